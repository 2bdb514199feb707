"""Says how every run is trained, and what is kept of it."""

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
