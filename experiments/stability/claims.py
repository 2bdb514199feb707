"""The claims of Equinox issue #659, and how each is judged."""

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

Runs = dict[Setting, Curves]
Quantity = Callable[[Curves], NDArray[np.float64]]  # one value a seed


def peak(curves: Curves) -> NDArray[np.float64]:
    """Returns the largest gradient norm of any parameter in the first steps."""
    return curves["largest_gradient_norm"][:, :FIRST_STEPS].max(axis=1)


def mean_loss(curves: Curves) -> NDArray[np.float64]:
    """Returns the training loss averaged over all steps."""
    return curves["loss"].mean(axis=1)


class Ratio:
    """A ratio of two settings, seed by seed: both start alike and see the same images."""

    def __init__(self, runs: Runs, quantity: Quantity, a: Setting, b: Setting):
        if a not in runs or b not in runs:
            raise NotMeasured
        values = quantity(runs[a]) / quantity(runs[b])
        self.median = float(np.median(values))
        self.low, self.high = float(values.min()), float(values.max())

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def _spike_and_loss(runs: Runs) -> tuple[str, bool]:
    spike, loss = Ratio(runs, peak, EMA, BATCH), Ratio(runs, mean_loss, EMA, BATCH)
    holds = spike.median >= SPIKE and loss.median > AS_WELL
    return f"peak ema/batch {spike}, loss ema/batch {loss}", holds


def _low_momentum(runs: Runs) -> tuple[str, bool]:
    loss = Ratio(runs, mean_loss, Setting("ema", 0.5), BATCH)
    return f"loss ema/batch {loss}", loss.median <= AS_WELL


def _adam(runs: Runs) -> tuple[str, bool]:
    helps, spikes = Ratio(runs, peak, ADAM, EMA), Ratio(runs, peak, ADAM, BATCH)
    holds = helps.median < 1 and spikes.median >= SPIKE
    return f"peak adam/ema {helps}, adam/batch {spikes}", holds


def _smooth_start(runs: Runs) -> tuple[str, bool]:
    spike, loss = Ratio(runs, peak, SMOOTH, ADAM), Ratio(runs, mean_loss, SMOOTH, ADAM)
    holds = spike.median < 1 and loss.median <= 1
    return f"peak smooth_start/adam {spike}, loss {loss}", holds


def _same_as_batch(runs: Runs) -> tuple[str, bool]:
    smooth = Setting("smooth_start", 0.9999)
    spike, loss = Ratio(runs, peak, smooth, BATCH), Ratio(runs, mean_loss, smooth, BATCH)
    holds = max(spike.high, loss.high, 1 / spike.low, 1 / loss.low) <= SAME
    return f"peak smooth_start/batch {spike}, loss {loss}", holds


CLAIMS = (
    Claim("1. ema at 0.99 spikes, and its loss is higher than batch's", _spike_and_loss),
    Claim("2. ema at 0.5 trains as well as batch", _low_momentum),
    Claim("3. adam at 0.99 helps, and still spikes", _adam),
    Claim(
        "4. smooth_start at 0.99 is better than adam: lower peak, no higher loss",
        _smooth_start,
    ),
    Claim("5. smooth_start at 0.9999 is the same as batch", _same_as_batch),
)
