"""Says how every run is trained, how its batches are corrupted, and what is kept of it."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from experiments.lab.curves import Curves
from experiments.lab.training import Images

MOMENTUM = 0.99
# Ginsburg's factor. He starts after 200 batches; here training has settled after 100. (All of
# it 100 steps later has the same verdicts.)
RATIO, START = 4.0, 100
# Soon after clipping has started. A third of a corrupted batch is left in the running average
# at the end, a hundred steps after the last: a momentum of 0.99 forgets slowly.
CORRUPTED = (110, 120, 130)
STEPS = 230
# "Soon after" and "at the end": the mean over so many steps.
WINDOW = 20

CLEAN = "none"
SCALED, CONTRAST, ONE_IMAGE = "scaled by 1e3", "contrast by 1e3", "one image by 1e3"
CONSTANT, LOUD, FAINT = "constant", "constant 1e3", "scaled by 1e-3"

# What is done to a batch in which 0 is black and 1 is white.
CORRUPTIONS: dict[str, Callable[[Images], Images]] = {
    CLEAN: lambda ink: ink,
    # A variance 1e6 times as large, a mean 1e3 times.
    SCALED: lambda ink: 1e3 * ink,
    # A variance 1e6 times as large, too, but the mean of every pixel over the batch stays.
    CONTRAST: lambda ink: ink.mean(axis=0) + 1e3 * (ink - ink.mean(axis=0)),
    # The first of 64: a variance 2e4 times as large, a mean 20 times.
    ONE_IMAGE: lambda ink: np.concatenate([1e3 * ink[:1], ink[1:]]),
    # A variance of 0. White, or 1e3 times as bright.
    CONSTANT: np.ones_like,
    LOUD: lambda ink: np.full_like(ink, 1e3),
    # A variance 1e-6 times as large.
    FAINT: lambda ink: 1e-3 * ink,
}


def corrupted(images: Images, corruption: str) -> Images:
    """Returns the images, from -1 to 1, corrupted so."""
    if corruption == CLEAN:
        return images
    ink = CORRUPTIONS[corruption]((images + np.float32(1)) / np.float32(2))
    return (2 * ink - 1).astype(np.float32)


class Setting(NamedTuple):
    approach: str
    clipped: bool
    corruption: str


class Run(NamedTuple):
    """Holds what is kept of a run; the largest are from the first corrupted batch on."""

    approach: str
    clipped: bool
    corruption: str
    seed: int
    loss: float  # the largest
    gradient: float  # the largest norm of any parameter's
    accuracy_after: float  # in training on clean batches, soon after the last corrupted one
    accuracy_end: float  # training accuracy at the end
    test_after: float  # test accuracy in inference mode, right after that one
    test_end: float
    variance: float  # the largest running variance, mean over channels
    growth: float  # the largest factor by which that grows in one step


class Step(NamedTuple):
    """Holds one step of the curves that the figures show."""

    approach: str
    clipped: bool
    corruption: str
    seed: int
    step: int
    loss: float
    training_accuracy: float
    running_variance: float  # mean over channels
    test_accuracy: float  # in inference mode; NaN where it was not measured


def summary(setting: Setting, seed: int, curves: Curves) -> Run:
    """Returns the row of a run; `curves` are those of one seed, `[steps]` each."""
    first, last = CORRUPTED[0] - 1, CORRUPTED[-1]
    accuracy, test = curves["training_accuracy"], curves["test_accuracy"]
    variance = curves["running_variance"]
    return Run(
        *setting,
        seed,
        loss=float(curves["loss"][first:].max()),
        gradient=float(curves["largest_gradient_norm"][first:].max()),
        accuracy_after=float(accuracy[last : last + WINDOW].mean()),
        accuracy_end=float(accuracy[-WINDOW:].mean()),
        test_after=float(test[last - 1]),
        test_end=float(test[-1]),
        variance=float(variance[first:].max()),
        growth=float((variance[first:] / variance[first - 1 : -1]).max()),
    )
