"""Corrupts a training batch in several ways."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# A batch of images, [n, 1, 28, 28]; 0 is black and 1 is white.
Ink = NDArray[np.float32]


def _contrast(ink: Ink) -> Ink:
    mean = ink.mean(axis=0)
    return mean + 1e3 * (ink - mean)


def _one_image(ink: Ink) -> Ink:
    return np.concatenate([1e3 * ink[:1], ink[1:]])


CLEAN = "none"
SCALED, CONTRAST, ONE_IMAGE = "scaled by 1e3", "contrast by 1e3", "one image by 1e3"
CONSTANT, LOUD, FAINT = "constant", "constant 1e3", "scaled by 1e-3"

CORRUPTIONS: dict[str, Callable[[Ink], Ink]] = {
    CLEAN: lambda ink: ink,
    # A variance 1e6 times as large, a mean 1e3 times.
    SCALED: lambda ink: 1e3 * ink,
    # A variance 1e6 times as large, too, but the mean of every pixel over the batch stays.
    CONTRAST: _contrast,
    # The first of 64: a variance 2e4 times as large, a mean 20 times.
    ONE_IMAGE: _one_image,
    # A variance of 0. White, or 1e3 times as bright.
    CONSTANT: lambda ink: np.full(ink.shape, 1, np.float32),
    LOUD: lambda ink: np.full(ink.shape, 1e3, np.float32),
    # A variance 1e-6 times as large.
    FAINT: lambda ink: 1e-3 * ink,
}


def corrupted(images: NDArray[np.float32], corruption: str) -> NDArray[np.float32]:
    """Returns the images, from -1 to 1, corrupted so."""
    if corruption == CLEAN:
        return images
    ink = CORRUPTIONS[corruption]((images + np.float32(1)) / np.float32(2))
    return (2 * ink - 1).astype(np.float32)
