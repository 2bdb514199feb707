"""Judges the claims of Equinox issue #659."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from experiments.lab.claims import Claim, NotMeasured
from experiments.lab.curves import Curves

from .runs import Setting

# The issue sees the gradients spike "2-3 iterations in"; ten steps leave room for seeds.
FIRST_STEPS = 10
# A spike is a gradient twice as large as any that `batch` has in the same steps.
SPIKE = 2.0
# "As well as": a mean loss at most 5% higher; "higher" is more than that. ("Better" has no
# margin.)
AS_WELL = 1.05
# "The same": within 2%.
SAME = 1.02

# What `batch` trains by does not depend on the momentum: one run of it serves every claim.
BATCH = Setting("batch", 0.99)
EMA, ADAM, SMOOTH = (Setting(name, 0.99) for name in ("ema", "adam", "smooth_start"))
EMA_LOW, SMOOTHER = Setting("ema", 0.5), Setting("smooth_start", 0.9999)
COMPARED = (BATCH, EMA, EMA_LOW, ADAM, SMOOTH, SMOOTHER)

Runs = dict[Setting, Curves]
Quantity = Callable[[Curves], NDArray[np.float64]]  # one value a seed


def peak(curves: Curves) -> NDArray[np.float64]:
    """Returns the largest gradient norm of any parameter in the first steps."""
    return curves["largest_gradient_norm"][:, :FIRST_STEPS].max(axis=1)


def mean_loss(curves: Curves) -> NDArray[np.float64]:
    """Returns the training loss averaged over all steps."""
    return curves["loss"].mean(axis=1)


class Ratio:
    """Divides two settings seed by seed: both start alike and see the same images."""

    def __init__(self, runs: Runs, quantity: Quantity, a: Setting, b: Setting):
        if a not in runs or b not in runs:
            raise NotMeasured
        values = quantity(runs[a]) / quantity(runs[b])
        self.median = float(np.median(values))
        self.low, self.high = float(values.min()), float(values.max())

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def _claim(
    text: str,
    compared: dict[str, tuple[Quantity, Setting, Setting]],
    holds: Callable[..., bool],
) -> Claim:
    """Returns the claim that `holds` says of the ratios of what is compared."""

    def judge(runs: Runs) -> tuple[str, bool]:
        ratios = {name: Ratio(runs, *of) for name, of in compared.items()}
        said = ", ".join(f"{name} {ratio}" for name, ratio in ratios.items())
        return said, holds(*ratios.values())

    return Claim(text, judge)


CLAIMS = (
    _claim(
        "1. ema at 0.99 spikes, and its loss is higher than batch's",
        {"peak ema/batch": (peak, EMA, BATCH), "loss ema/batch": (mean_loss, EMA, BATCH)},
        lambda peak, loss: peak.median >= SPIKE and loss.median > AS_WELL,
    ),
    _claim(
        "2. ema at 0.5 trains as well as batch",
        {"loss ema/batch": (mean_loss, EMA_LOW, BATCH)},
        lambda loss: loss.median <= AS_WELL,
    ),
    _claim(
        "3. adam at 0.99 helps, and still spikes",
        {"peak adam/ema": (peak, ADAM, EMA), "adam/batch": (peak, ADAM, BATCH)},
        lambda helps, spikes: helps.median < 1 and spikes.median >= SPIKE,
    ),
    _claim(
        "4. smooth_start at 0.99 is better than adam: lower peak, no higher loss",
        {"peak smooth_start/adam": (peak, SMOOTH, ADAM), "loss": (mean_loss, SMOOTH, ADAM)},
        lambda peak, loss: peak.median < 1 and loss.median <= 1,
    ),
    _claim(
        "5. smooth_start at 0.9999 is the same as batch",
        {
            "peak smooth_start/batch": (peak, SMOOTHER, BATCH),
            "loss": (mean_loss, SMOOTHER, BATCH),
        },
        lambda *ratios: all(max(r.high, 1 / r.low) <= SAME for r in ratios),
    ),
)
