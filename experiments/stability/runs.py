"""Lists the settings that are trained, and defines what is kept of their runs."""

from typing import NamedTuple


class Setting(NamedTuple):
    approach: str
    momentum: float

    @property
    def label(self) -> str:
        return "no norm" if self == NO_NORM else f"{self.approach} {self.momentum:g}"


NO_NORM = Setting("none", 0.0)
# What `batch` trains by does not depend on the momentum: one run of it serves every claim.
BATCH, EMA, ADAM, SMOOTH = (Setting(a, 0.99) for a in ("batch", "ema", "adam", "smooth_start"))
EMA_LOW, SMOOTHER = Setting("ema", 0.5), Setting("smooth_start", 0.9999)
COMPARED = (BATCH, EMA, EMA_LOW, ADAM, SMOOTH, SMOOTHER)  # by the claims

# What the three figures show.
FIGURE_1 = (NO_NORM, EMA, BATCH, EMA_LOW)
MOMENTA = (0.5, 0.99, 0.9999)
FIGURE_2 = tuple(
    Setting(approach, momentum)
    for momentum in MOMENTA
    for approach in ("batch", "adam", "smooth_start", "ema")
)
FIGURE_3 = (BATCH, EMA, ADAM, SMOOTH, Setting("variance_clip", 0.99))
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
