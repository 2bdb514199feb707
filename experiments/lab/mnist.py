"""Reads MNIST, the handwritten digits, from IDX files.

The first 10,000 training and the first 2,000 test images are part of this repository, in
`experiments/data/mnist/`. All of it is read from a folder of your own with the four files under
their published names, each plain or packed as `.gz` or `.xz`: the `--data` of an experiment.
"""

import argparse
import gzip
import lzma
import math
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import UserError

SUBSET = Path(__file__).parents[1] / "data" / "mnist"
TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
PUBLISHED = "https://storage.googleapis.com/cvdf-datasets/mnist/"

_OPEN: dict[str, Any] = {"": open, ".gz": gzip.open, ".xz": lzma.open}


class Split(NamedTuple):
    images: NDArray[np.uint8]  # (n, 28, 28), read-only
    labels: NDArray[np.uint8]  # (n,), read-only


class Mnist(NamedTuple):
    train: Split
    test: Split


def load(source: str = "subset") -> Mnist:
    """Returns MNIST from `"subset"` or from a folder; else raises a `UserError`."""
    folder = SUBSET if source == "subset" else Path(source).expanduser()
    return Mnist(*(_split(folder, *names) for names in (TRAIN, TEST)))


def scaled(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns images of 0 … 255 as −1 … 1, with a channel axis: (n, 1, 28, 28)."""
    white, half = np.float32(255), np.float32(0.5)
    return (images[:, None].astype(np.float32) / white - half) / half


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--data`, the source."""
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help="'subset': 10,000 training images of MNIST that are part of this repository "
        f"(default); or a folder with the four IDX files, as published: {PUBLISHED}",
    )


def _split(folder: Path, images: str, labels: str) -> Split:
    split = Split(_array(folder, images, (28, 28)), _array(folder, labels, ()))
    if len(split.labels) != len(split.images) or split.labels.max() > 9:
        raise UserError(
            f"{folder / labels}: expected {len(split.images)} labels from 0 to 9, one for each "
            f"image in {images}, found {len(split.labels)} up to {split.labels.max()}"
        )
    return split


def _array(folder: Path, name: str, item: tuple[int, ...]) -> NDArray[np.uint8]:
    """Returns what an IDX file holds: magic number, sizes, bytes, all big-endian."""
    paths = {folder / (name + suffix): opened for suffix, opened in _OPEN.items()}
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        found = "none of them" if folder.is_dir() else "no such folder"
        raise UserError(
            f"{folder / name}: expected it, plain or as .gz or .xz, found {found}; the subset "
            f"is restored with `git checkout {SUBSET}`, the published files are in {PUBLISHED}"
        )
    try:
        with paths[path](path, "rb") as file:
            content = file.read()
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: expected a whole file, found: {error}") from error
    # A file of this length has only one right header.
    start = 4 * (2 + len(item))
    count = (len(content) - start) // math.prod(item)
    header = struct.pack(f">{2 + len(item)}I", 0x801 + len(item), max(count, 1), *item)
    if len(content) != start + count * math.prod(item) or content[:start] != header:
        what = f"images of {item}" if item else "labels"
        found = f"{len(content)} bytes that begin with {content[:start].hex()}"
        raise UserError(f"{path}: expected an IDX file of {what}, found {found}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(count, *item)
