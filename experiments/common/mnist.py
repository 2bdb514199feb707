"""Reads MNIST, the handwritten digits, from IDX files.

The first 10,000 training and 2,000 test images are in `experiments/data/mnist/`. An
experiment's `--data` names a folder with all of MNIST: the four files under their published
names, each plain or packed as `.gz` or `.xz`.
"""

import gzip
import lzma
import math
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .report import UserError

SUBSET = Path(__file__).parents[1] / "data" / "mnist"
TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
PUBLISHED = "https://storage.googleapis.com/cvdf-datasets/mnist/"
HELP = f"folder with the four IDX files of MNIST ({PUBLISHED}); default: the subset here"
MOST = 100_000  # images in a file; the published files have 60,000 and 10,000

_OPEN: dict[str, Any] = {"": open, ".gz": gzip.open, ".xz": lzma.open}


class Split(NamedTuple):
    images: NDArray[np.uint8]  # [n, 28, 28], read-only
    labels: NDArray[np.uint8]  # [n], read-only


class Mnist(NamedTuple):
    train: Split
    test: Split


def load(folder: str | Path = SUBSET) -> Mnist:
    """Returns MNIST from a folder; raises `UserError` if a file is missing or wrong."""
    return Mnist(*(_split(Path(folder).expanduser(), *names) for names in (TRAIN, TEST)))


def scaled(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Scales images from 0 … 255 to −1 … 1, and adds a channel axis: [n, 1, 28, 28]."""
    white, half = np.float32(255), np.float32(0.5)
    return (images[:, None].astype(np.float32) / white - half) / half


def _split(folder: Path, images: str, labels: str) -> Split:
    split = Split(_array(folder, images, (28, 28)), _array(folder, labels, ()))
    if len(split.labels) != len(split.images) or split.labels.max() > 9:
        raise UserError(
            f"{folder / labels}: expected {len(split.images)} labels from 0 to 9, one for each "
            f"image in {images}, found {len(split.labels)} up to {split.labels.max()}"
        )
    return split


def _array(folder: Path, name: str, item: tuple[int, ...]) -> NDArray[np.uint8]:
    """Reads an IDX file, which has a magic number, sizes, and bytes, all big-endian."""
    paths = {folder / (name + suffix): opened for suffix, opened in _OPEN.items()}
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        found = "none of them" if folder.is_dir() else "no such folder"
        raise UserError(
            f"{folder / name}: expected this file, plain or as .gz or .xz, found {found}; "
            f"restore the subset by `git checkout {SUBSET}`, or download all of {PUBLISHED}"
        )
    start = 4 * (2 + len(item))
    try:
        with paths[path](path, "rb") as file:
            header = file.read(start)
            count = min(int.from_bytes(header[4:8], "big"), MOST)
            # At most one byte too many: a small packed file may hold gigabytes.
            content = file.read(count * math.prod(item) + 1)
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: expected a whole file, found: {error}") from error
    right = struct.pack(f">{2 + len(item)}I", 0x801 + len(item), max(count, 1), *item)
    if header != right or len(content) != count * math.prod(item):
        what = f"up to {MOST} images of {item}" if item else f"up to {MOST} labels"
        found = f"header {header.hex() or 'of 0 bytes'}, then {len(content)} bytes or more"
        raise UserError(f"{path}: expected an IDX file of {what}, found {found}")
    return np.frombuffer(content, np.uint8).reshape(count, *item)
