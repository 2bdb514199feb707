"""MNIST, the handwritten digits, for the experiments.

The `--data` of an experiment names one of three sources:

- `subset`, the default: the first 10,000 training and the first 2,000 test images, which are
  part of this repository, in `experiments/data/mnist/`.
- `download`: all 60,000 and 10,000. They are fetched once, 11 MB, compared with the SHA-256
  of what was published, and kept in `eqx-norm/mnist` under `XDG_CACHE_HOME`, or `~/.cache`.
- anything else: your own folder with the four files under their published names, each plain or
  packed as `.gz` or `.xz`, and none with more than 60,000 images.
"""

import argparse
import contextlib
import functools
import gzip
import hashlib
import http.client
import io
import lzma
import math
import os
import struct
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import UserError

SUBSET = Path(__file__).parents[1] / "data" / "mnist"
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SHA256_UNPACKED = {
    TRAIN[0]: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    TRAIN[1]: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    TEST[0]: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    TEST[1]: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
IMAGES_MAGIC, LABELS_MAGIC = 0x00000803, 0x00000801
# Bytes of the largest of the files, unpacked. A few of .xz may be a thousand times as many.
LARGEST = 16 + 60_000 * 28 * 28

_UNPACK: dict[str, Callable[[BinaryIO], Any]] = {
    "": lambda file: file,
    ".gz": gzip.open,
    ".xz": lzma.open,
}
_File = tuple[Path | str, bytes]  # where it is, and its content, unpacked


class DataError(UserError):
    """Raised where MNIST cannot be read: names the file, what was expected, and the fix."""


class Split(NamedTuple):
    images: NDArray[np.uint8]  # (n, 28, 28), read-only
    labels: NDArray[np.uint8]  # (n,), read-only


class Mnist(NamedTuple):
    train: Split
    test: Split


def load(source: str = "subset") -> Mnist:
    """Returns MNIST from `"subset"`, `"download"` or a folder; else raises a `DataError`."""
    if source == "subset":
        read = functools.partial(_in_folder, SUBSET)
        fix = "restore it with `git checkout experiments/data/mnist`, or give --data download"
    elif source == "download":
        read = _downloaded
        fix = "give --data subset, or --data FOLDER with the four files in it"
    else:
        read = functools.partial(_in_folder, Path(os.path.expanduser(source)).absolute())
        fix = "give --data download for the published files"
    try:
        return Mnist(*(_split(read(images), read(labels)) for images, labels in (TRAIN, TEST)))
    except DataError as error:
        raise DataError(f"{error}; {fix}") from error.__cause__


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
        "(default); 'download': all of it, from a public mirror; or a folder with the four "
        "IDX files",
    )


def kind(source: str) -> str:
    """Returns what is noted of a source beside results: no path."""
    return source if source in ("subset", "download") else "folder"


def _wrong(where: object, expected: str, found: object) -> DataError:
    return DataError(f"{where}: expected {expected}, found {found}")


def _split(images_file: _File, labels_file: _File) -> Split:
    images = _array(images_file, IMAGES_MAGIC, (28, 28))
    labels = _array(labels_file, LABELS_MAGIC, ())
    if len(labels) != len(images):
        wanted = f"{len(images)} labels, one for each image in {images_file[0]}"
        raise _wrong(labels_file[0], wanted, len(labels))
    if (beyond := np.flatnonzero(labels > 9)).size:
        found = f"{labels[beyond[0]]} at index {beyond[0]}"
        raise _wrong(labels_file[0], "labels from 0 to 9", found)
    return Split(images, labels)


def _array(file: _File, magic: int, item: tuple[int, ...]) -> NDArray[np.uint8]:
    """Returns what an IDX file holds: magic number, dimensions, bytes, all big-endian."""
    where, content = file
    header = struct.Struct(f">II{len(item)}I")
    if len(content) < header.size:
        raise _wrong(where, f"an IDX header of {header.size} bytes", f"{len(content)} bytes")
    found_magic, count, *size = header.unpack_from(content)
    if found_magic != magic:
        raise _wrong(where, f"the magic number 0x{magic:08x}", f"0x{found_magic:08x}")
    if tuple(size) != item:
        raise _wrong(where, f"images of size {item}", tuple(size))
    if not count:
        raise _wrong(where, "one image or more" if item else "one label or more", "none")
    total = header.size + count * math.prod(item)
    if len(content) != total:
        raise _wrong(where, f"{total} bytes for {count} items", f"{len(content)} bytes")
    return np.frombuffer(content, np.uint8, offset=header.size).reshape(count, *item)


def _in_folder(folder: Path, name: str) -> _File:
    for suffix in _UNPACK:
        path = folder / (name + suffix)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _wrong(path, "a file that can be read", error.strerror) from error
        with file:
            return _unpacked(path, file, suffix)
    found = "none of them" if os.path.isdir(folder) else "no such folder"
    raise _wrong(folder / name, "this file, or the same with .gz or .xz", found)


def _downloaded(name: str) -> _File:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cached = Path(root, "eqx-norm", "mnist", name + ".gz").absolute()
    with contextlib.suppress(OSError, DataError):
        return _verified(cached, cached.read_bytes(), name)
    failures: list[str] = []
    for mirror in MIRRORS:
        url = f"{mirror}{name}.gz"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                packed = answer.read(LARGEST + 1)
            file = _verified(url, packed, name)
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{url}: expected the file, found {error}")
        except DataError as error:
            failures.append(str(error))
        else:
            _keep(cached, packed)
            return file
    raise DataError("; ".join(failures))


def _verified(where: Path | str, packed: bytes, name: str) -> _File:
    _, content = file = _unpacked(where, io.BytesIO(packed), ".gz")
    expected, found = SHA256_UNPACKED[name], hashlib.sha256(content).hexdigest()
    if found != expected:
        raise _wrong(where, f"SHA-256 {expected} of the unpacked content", found)
    return file


def _unpacked(where: Path | str, packed: BinaryIO, suffix: str) -> _File:
    try:
        content = _UNPACK[suffix](packed).read(LARGEST + 1)
    except (EOFError, MemoryError, OSError, zlib.error, lzma.LZMAError) as error:
        raise _wrong(where, f"a whole {suffix} file", f"a broken one ({error})") from error
    if len(content) > LARGEST:
        raise _wrong(where, f"{LARGEST} bytes at most, as many as MNIST's largest file", "more")
    return where, content


def _keep(path: Path, packed: bytes) -> None:
    """Writes `path` whole or not at all, also when two experiments do so at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
            part = Path(unfinished, path.name)
            part.write_bytes(packed)
            os.replace(part, path)
    except OSError as error:
        wanted = "a cache that can be written (XDG_CACHE_HOME says where)"
        raise _wrong(path, wanted, error.strerror) from error
