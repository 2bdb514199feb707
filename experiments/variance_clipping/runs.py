"""How every run is trained, and what is kept of it."""

from typing import NamedTuple

from experiments.lab.curves import Curves

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


class Setting(NamedTuple):
    approach: str
    clipped: bool
    corruption: str

    @property
    def layer(self) -> str:
        return f"{self.approach}, clipped" if self.clipped else self.approach


class Run(NamedTuple):
    """A row of the results. "From" is from the first corrupted step on."""

    approach: str
    clipped: bool
    corruption: str
    seed: int
    loss: float  # the largest from
    gradient: float  # the largest norm from, of any parameter
    accuracy_after: float  # training accuracy of the clean batches soon after the last
    accuracy_end: float  # training accuracy at the end
    test_after: float  # test accuracy in inference mode, right after the last corrupted one
    test_end: float
    variance: float  # the largest running variance from, mean over channels
    growth: float  # the largest factor that it grows by in one step, from


class Step(NamedTuple):
    """A row of the curves that the figures show."""

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
    first, last = CORRUPTED[0] - 1, CORRUPTED[-1]
    accuracy, test = curves["training_accuracy"], curves["test_accuracy"]
    variance = curves["running_variance"]
    values = (
        curves["loss"][first:].max(),
        curves["largest_gradient_norm"][first:].max(),
        accuracy[last : last + WINDOW].mean(),
        accuracy[-WINDOW:].mean(),
        test[last - 1],
        test[-1],
        variance[first:].max(),
        (variance[first:] / variance[first - 1 : -1]).max(),
    )
    return Run(*setting, seed, *map(float, values))
