"""Lists the settings that are trained, and defines what is kept of their runs."""

from typing import NamedTuple

NO_NORM = "none"


class Setting(NamedTuple):
    approach: str  # or `NO_NORM`
    momentum: float  # 0 where nothing is normalised, so that there is one such setting

    @property
    def label(self) -> str:
        return "no norm" if self.approach == NO_NORM else f"{self.approach} {self.momentum:g}"


# What the three figures show.
FIGURE_1 = (
    Setting(NO_NORM, 0.0),
    Setting("ema", 0.99),
    Setting("batch", 0.99),
    Setting("ema", 0.5),
)
MOMENTA = (0.5, 0.99, 0.9999)
FIGURE_2 = tuple(
    Setting(approach, momentum)
    for momentum in MOMENTA
    for approach in ("batch", "adam", "smooth_start", "ema")
)
FIGURE_3 = tuple(
    Setting(approach, 0.99)
    for approach in ("batch", "ema", "adam", "smooth_start", "variance_clip")
)
SETTINGS = tuple(dict.fromkeys((*FIGURE_1, *FIGURE_2, *FIGURE_3)))


class Step(NamedTuple):
    """Holds one training step of one run."""

    approach: str
    momentum: float
    seed: int
    step: int
    loss: float
    largest_gradient_norm: float  # of any parameter
    output_mean: float  # of the (last) normalisation layer
    output_std: float
    test_accuracy: float  # in inference mode; NaN where it was not measured


class Gradient(NamedTuple):
    """Holds the gradient norms of one module's parameters at one step, for figure 1."""

    approach: str
    momentum: float
    seed: int
    step: int
    module: str
    weight: float
    bias: float
