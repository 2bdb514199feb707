"""The claims of Equinox issue #659, each with its measured numbers and a verdict."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .lab.training import Record
from .stability_runs import Runs, Setting

# The issue sees the gradients spike "2-3 iterations in"; ten steps leave room for seeds.
FIRST_STEPS = 10
# A spike is a gradient twice as large as any that `batch` has in the same steps.
SPIKE = 2.0
# "As well as": a mean loss at most 5% higher; "higher" is more than that. ("Better" has no
# margin.)
AS_WELL = 1.05
# "The same": within 2%.
SAME = 1.02


class Verdict(NamedTuple):
    claim: str
    measured: str
    holds: bool | None  # None: its runs were not asked for


def peak(record: Record) -> float:
    """The largest gradient norm of any parameter in the first steps."""
    return float(record.gradient_norms[:, :FIRST_STEPS].max())


def mean_loss(record: Record) -> float:
    """The training loss averaged over all steps."""
    return float(record.loss.mean())


class Ratio(NamedTuple):
    """Of a quantity between two settings, seed by seed: both start alike and see the same."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


# What `batch` trains by does not depend on the momentum: one run of it serves every claim.
BATCH = Setting("batch", 0.99)


class _NotRunError(Exception):
    pass


def ratio(runs: Runs, of: Callable[[Record], float], a: Setting, b: Setting) -> Ratio:
    if a not in runs or b not in runs:
        raise _NotRunError
    values = [of(runs[a][seed]) / of(runs[b][seed]) for seed in runs[a]]
    return Ratio(float(np.median(values)), min(values), max(values))


def _spike_and_loss(runs: Runs) -> tuple[str, bool]:
    ema = Setting("ema", 0.99)
    spike, loss = ratio(runs, peak, ema, BATCH), ratio(runs, mean_loss, ema, BATCH)
    return (
        f"peak ema/batch {spike}, loss ema/batch {loss}",
        spike.median >= SPIKE and loss.median > AS_WELL,
    )


def _low_momentum(runs: Runs) -> tuple[str, bool]:
    loss = ratio(runs, mean_loss, Setting("ema", 0.5), BATCH)
    return f"loss ema/batch {loss}", loss.median <= AS_WELL


def _adam(runs: Runs) -> tuple[str, bool]:
    adam, ema = Setting("adam", 0.99), Setting("ema", 0.99)
    helps, spikes = ratio(runs, peak, adam, ema), ratio(runs, peak, adam, BATCH)
    return (
        f"peak adam/ema {helps}, adam/batch {spikes}",
        helps.median < 1 and spikes.median >= SPIKE,
    )


def _smooth_start(runs: Runs) -> tuple[str, bool]:
    smooth, adam = Setting("smooth_start", 0.99), Setting("adam", 0.99)
    spike, loss = ratio(runs, peak, smooth, adam), ratio(runs, mean_loss, smooth, adam)
    return (
        f"peak smooth_start/adam {spike}, loss {loss}",
        spike.median < 1 and loss.median <= 1,
    )


def _same_as_batch(runs: Runs) -> tuple[str, bool]:
    smooth = Setting("smooth_start", 0.9999)
    spike, loss = ratio(runs, peak, smooth, BATCH), ratio(runs, mean_loss, smooth, BATCH)
    same = max(spike.high, loss.high, 1 / spike.low, 1 / loss.low) <= SAME
    return f"peak smooth_start/batch {spike}, loss {loss}", same


CLAIMS: dict[str, Callable[[Runs], tuple[str, bool]]] = {
    "1. ema at 0.99 spikes, and its loss is higher than batch's": _spike_and_loss,
    "2. ema at 0.5 trains as well as batch": _low_momentum,
    "3. adam at 0.99 helps, and still spikes": _adam,
    "4. smooth_start at 0.99 is better than adam: lower peak, no higher loss": _smooth_start,
    "5. smooth_start at 0.9999 is the same as batch": _same_as_batch,
}


def judge(runs: Runs) -> list[Verdict]:
    verdicts = []
    for claim, measure in CLAIMS.items():
        try:
            verdicts.append(Verdict(claim, *measure(runs)))
        except _NotRunError:
            verdicts.append(Verdict(claim, "its runs were not asked for", None))
    return verdicts


def summary(runs: Runs) -> list[dict[str, Any]]:
    """Of each setting: medians over the seeds of the numbers that the claims are about."""

    def median(records: list[Record], of: Callable[[Record], float]) -> float:
        return float(f"{np.median([of(record) for record in records]):.4g}")

    return [
        {
            "setting": setting.label,
            "peak_gradient_norm": median(list(records.values()), peak),
            "mean_loss": median(list(records.values()), mean_loss),
            "last_loss": median(list(records.values()), lambda r: float(r.loss[-10:].mean())),
            "test_accuracy": median(list(records.values()), lambda r: float(r.accuracy[-1])),
        }
        for setting, records in runs.items()
    ]
