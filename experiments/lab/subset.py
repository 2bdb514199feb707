"""Rebuilds the MNIST subset in `experiments/data/mnist/`, or checks that it is what it says.

    python -m experiments.lab.subset --data DIR
    python -m experiments.lab.subset --data DIR --check

The subset is the first 10,000 training and the first 2,000 test images with their labels,
each again an IDX file, packed as .xz: 15% smaller than .gz. Nothing but the content goes
into an .xz file, no time and no name, so every rebuild gives the same bytes.
"""

import hashlib
import lzma
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import mnist
from .experiment import parser as make_parser

TRAIN_COUNT, TEST_COUNT = 10_000, 2_000

# Its dictionary, 8 MiB, holds the largest of the files: a higher preset gains nothing.
PRESET = 6 | lzma.PRESET_EXTREME
SAME = "the same"


def subset(data: mnist.Mnist) -> dict[str, bytes]:
    """Returns the subset's four IDX files, by name and unpacked."""
    files: dict[str, bytes] = {}
    for names, split, count in (
        (mnist.TRAIN, data.train, TRAIN_COUNT),
        (mnist.TEST, data.test, TEST_COUNT),
    ):
        if len(split.images) < count:
            raise mnist.DataError(
                f"{names[0]}: expected at least {count} images, found {len(split.images)}; "
                "give --data download, or the folder with the published files"
            )
        files[names[0]] = _idx(mnist.IMAGES_MAGIC, split.images[:count])
        files[names[1]] = _idx(mnist.LABELS_MAGIC, split.labels[:count])
    return files


def packed(content: bytes) -> bytes:
    return lzma.compress(content, check=lzma.CHECK_CRC64, preset=PRESET)


def _idx(magic: int, array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">I{array.ndim}I", magic, *array.shape) + array.tobytes()


def _compare(path: Path, content: bytes) -> str:
    """Returns how the file at `path` compares with what a rebuild would write."""
    if not path.exists():
        return "is missing"
    found = path.read_bytes()
    if found == packed(content):
        return SAME
    try:
        repacked = lzma.decompress(found) == content
    except lzma.LZMAError:
        repacked = False
    return "holds the same data, packed by another version of xz" if repacked else "differs"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("lab.subset", __doc__)
    add = parser.add_argument
    source = "the folder with the four published files, plain or as .gz or .xz; "
    add("--data", required=True, metavar="DIR", help=source + "'download' fetches them")
    where = "where the subset is written, or compared (default: the repository's)"
    add("--out", type=Path, default=mnist.SUBSET, metavar="DIR", help=where)
    check = (
        "write nothing: compare what a rebuild would write with what is there, bit for bit, "
    )
    add("--check", action="store_true", help=check + "and exit with 1 if anything differs")
    options = parser.parse_args(arguments)
    different = False
    try:
        for name, content in subset(mnist.load(options.data)).items():
            path: Path = options.out / f"{name}.xz"
            if options.check:
                verdict = _compare(path, content)
                different |= verdict != SAME
                print(f"{path.name}: {verdict}")
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(packed(content))
                digest = hashlib.sha256(content).hexdigest()
                print(f"{path.name}: {path.stat().st_size} bytes, SHA-256 unpacked {digest}")
    except (mnist.DataError, OSError) as error:
        parser.exit(2, f"{error}\n")
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
