"""Reads a subset of MNIST, the handwritten digits: 10,000 training and 2,000 test images."""

import functools
import lzma
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SUBSET = Path(__file__).parents[1] / "data" / "mnist"


class Split(NamedTuple):
    images: NDArray[np.uint8]  # [n, 28, 28], read-only
    labels: NDArray[np.uint8]  # [n], read-only


class Mnist(NamedTuple):
    train: Split
    test: Split


@functools.cache
def load() -> Mnist:
    """Returns the images and labels in `experiments/data/mnist`."""
    splits = (
        Split(_array(f"{name}-images-idx3-ubyte", 28, 28), _array(f"{name}-labels-idx1-ubyte"))
        for name in ("train", "t10k")
    )
    return Mnist(*splits)


def scaled(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Scales images from 0 … 255 to −1 … 1, and adds a channel axis: [n, 1, 28, 28]."""
    white, half = np.float32(255), np.float32(0.5)
    return (images[:, None].astype(np.float32) / white - half) / half


def _array(name: str, *item: int) -> NDArray[np.uint8]:
    """Reads an IDX file: a magic number, the size of each axis, in 4 bytes each, and data."""
    content = lzma.decompress((SUBSET / f"{name}.xz").read_bytes())
    return np.frombuffer(content, np.uint8, offset=4 * (2 + len(item))).reshape(-1, *item)
