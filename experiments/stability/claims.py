"""Judges the claims of Equinox issue #659."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.lab.claims import Claim, NotMeasured
from experiments.lab.curves import Curves

from .runs import ADAM, BATCH, EMA, EMA_LOW, SMOOTH, SMOOTHER, Setting

# The issue sees the gradients spike "2-3 iterations in"; ten steps leave room for seeds.
FIRST_STEPS = 10
# A spike is a gradient twice as large as any that `batch` has in the same steps.
SPIKE = 2.0
# "As well as": a mean loss at most 5% higher; "higher" is more than that. ("Better" has no
# margin.)
AS_WELL = 1.05
# "The same": within 2%.
SAME = 1.02

Runs = dict[Setting, Curves]
Quantity = Callable[[Curves], NDArray[np.float64]]  # one value a seed


def peak(curves: Curves) -> NDArray[np.float64]:
    """Returns the largest gradient norm of any parameter in the first steps."""
    return curves["largest_gradient_norm"][:, :FIRST_STEPS].max(axis=1)


def mean_loss(curves: Curves) -> NDArray[np.float64]:
    """Returns the training loss averaged over all steps."""
    return curves["loss"].mean(axis=1)


def _claim(
    text: str,
    compared: dict[str, tuple[Quantity, Setting, Setting]],
    holds: Callable[..., Any],
) -> Claim:
    """Returns the claim that `holds` is true of what is compared.

    Two settings are divided seed by seed: both start alike and see the same images.
    """

    def judge(runs: Runs) -> tuple[str, bool]:
        if any(not {a, b} <= runs.keys() for _, a, b in compared.values()):
            raise NotMeasured
        ratios = {name: of(runs[a]) / of(runs[b]) for name, (of, a, b) in compared.items()}
        said = (
            f"{name} {np.median(ratio):.2f} ({ratio.min():.2f} to {ratio.max():.2f})"
            for name, ratio in ratios.items()
        )
        return ", ".join(said), bool(holds(*ratios.values()))

    return Claim(text, judge)


CLAIMS = (
    _claim(
        "1. ema at 0.99 spikes, and its loss is higher than batch's",
        {"peak ema/batch": (peak, EMA, BATCH), "loss ema/batch": (mean_loss, EMA, BATCH)},
        lambda peak, loss: np.median(peak) >= SPIKE and np.median(loss) > AS_WELL,
    ),
    _claim(
        "2. ema at 0.5 trains as well as batch",
        {"loss ema/batch": (mean_loss, EMA_LOW, BATCH)},
        lambda loss: np.median(loss) <= AS_WELL,
    ),
    _claim(
        "3. adam at 0.99 helps, and still spikes",
        {"peak adam/ema": (peak, ADAM, EMA), "adam/batch": (peak, ADAM, BATCH)},
        lambda helps, spikes: np.median(helps) < 1 and np.median(spikes) >= SPIKE,
    ),
    _claim(
        "4. smooth_start at 0.99 is better than adam: lower peak, no higher loss",
        {"peak smooth_start/adam": (peak, SMOOTH, ADAM), "loss": (mean_loss, SMOOTH, ADAM)},
        lambda peak, loss: np.median(peak) < 1 and np.median(loss) <= 1,
    ),
    _claim(
        "5. smooth_start at 0.9999 is the same as batch",
        {
            "peak smooth_start/batch": (peak, SMOOTHER, BATCH),
            "loss": (mean_loss, SMOOTHER, BATCH),
        },
        lambda *ratios: np.maximum(ratios, np.reciprocal(ratios)).max() <= SAME,
    ),
)
