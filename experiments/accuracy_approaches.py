"""How accurate each approach is, in training and in inference, after many steps.

The statistics that normalise are then running averages, over batches whose mean and variance
change from step to step, and are compared with the same recursion in extended precision.
Errors are of y, in units of max(1, abs(xhat)), as in `experiments.accuracy`.
"""

import csv
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray
from tqdm import tqdm

from eqx_norm import BatchNorm
from eqx_norm.strategies import NAMED, AbstractStrategy, Batch, VarianceClip, named

from . import results
from .accuracy_cases import CHANNELS, EPS
from .accuracy_claims import Verdict, Y
from .accuracy_claims import table as claims_table
from .accuracy_measured import text

RATIOS = (1.0, 1e3, 1e5, 1e7)
MOMENTA = (0.5, 0.99)
EXAMPLES, VALUES = 16, 4
CLIP_START = 5
CLAIM = "10. y to 1e-6 of max(1, abs(xhat)), by every approach, in training and inference"
HEADER = ("approach", "momentum", "mean/std", "use", "error")


@dataclasses.dataclass(frozen=True)
class Job:
    steps: int = 300
    ratios: tuple[float, ...] = RATIOS
    momenta: tuple[float, ...] = MOMENTA
    approaches: tuple[str, ...] = tuple(NAMED)
    implementation: Literal["auto", "xla", "device_invariant"] = "auto"


WHOLE = Job()
QUICK = Job(steps=30, ratios=(1.0, 1e7), momenta=(0.99,))


class Run(NamedTuple):
    """Of what an error is."""

    approach: str
    momentum: float
    ratio: float
    use: str  # "training" or "inference"

    @property
    def at(self) -> str:
        return f"1e{round(np.log10(self.ratio))}"


Measured = dict[Run, float]


class Statistics(NamedTuple):
    """Of each channel, in extended precision."""

    mean: NDArray[np.longdouble]
    variance: NDArray[np.longdouble]


def batches(ratio: float, steps: int) -> Iterator[NDArray[np.float32]]:
    """Yields x, (EXAMPLES, CHANNELS, VALUES), of a mean that drifts, and jumps once."""
    random = np.random.RandomState(round(np.log10(ratio)))
    std = 10 ** random.uniform(-1, 1, (CHANNELS, 1))
    mean = ratio * std * np.where(np.arange(CHANNELS) % 2, -1, 1)[:, None]
    for step in range(steps):
        mean = mean + std * (random.standard_normal(std.shape) + 30 * (step == steps // 2))
        spread = std * 2 ** random.uniform(-1, 1, std.shape)
        x = mean + spread * random.standard_normal((EXAMPLES, CHANNELS, VALUES))
        yield x.astype(np.float32)


def of_batch(x: NDArray) -> Statistics:
    """Returns the exact statistics of one batch."""
    wide = x.astype(np.longdouble)
    return Statistics(wide.mean((0, 2)), wide.var((0, 2)))


def recursion(
    approach: str, momentum: float, history: Iterator[Statistics]
) -> Iterator[tuple[Statistics, Statistics]]:
    """Yields, for each batch, what normalises it and what normalises at inference after it."""
    m = np.longdouble(momentum)
    average, weight = np.zeros((2, CHANNELS), np.longdouble), np.longdouble(0)
    for step, exact in enumerate(history):
        batch = np.array(exact)
        if approach == "variance_clip" and step >= CLIP_START:
            g = average[1] / weight
            batch[1] = np.clip(batch[1], g / 4, 4 * (g + g.mean()))
        if approach == "ema":
            average = batch if step == 0 else m * average + (1 - m) * batch
            weight = np.longdouble(1)
        else:
            average, weight = m * average + (1 - m) * batch, m * weight + (1 - m)
        remembered = average / weight
        used = {
            "ema": remembered,
            "adam": remembered,
            "smooth_start": average + (1 - weight) * batch,
        }.get(approach, batch)
        yield Statistics(*used), Statistics(*remembered)


def strategy(approach: str, momentum: float) -> AbstractStrategy:
    """Returns the approach of that name; one that clips does so after few batches."""
    if approach == "variance_clip":
        return VarianceClip(Batch(momentum), start=CLIP_START)
    return named(approach, momentum)


def error(y: ArrayLike, x: NDArray, right: Statistics) -> float:
    """Returns the largest error of y, in units of max(1, abs(xhat))."""
    mean, variance = (statistic[:, None] for statistic in right)
    xhat = (x.astype(np.longdouble) - mean) / np.sqrt(variance + np.longdouble(EPS))
    off = np.abs(np.asarray(y, np.longdouble) - xhat) / np.maximum(1, np.abs(xhat))
    return float(np.max(np.where(np.isnan(off), np.inf, off)))


@eqx.filter_jit
def _call(
    layer: BatchNorm, x: jax.Array, state: eqx.nn.State
) -> tuple[jax.Array, eqx.nn.State]:
    return jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


def run(job: Job, call: Any = _call) -> Measured:
    """Returns the largest error over all steps; inference is on the batch just trained on."""
    measured: Measured = {}
    cases = [(a, m, r) for a in job.approaches for m in job.momenta for r in job.ratios]
    for approach, momentum, ratio in tqdm(cases, unit="case", disable=None):
        layer, state = eqx.nn.make_with_state(BatchNorm)(
            CHANNELS,
            "batch",
            eps=EPS,
            approach=strategy(approach, momentum),
            implementation=job.implementation,
        )
        inference = eqx.nn.inference_mode(layer)
        drawn = list(batches(ratio, job.steps))
        worst = {"training": 0.0, "inference": 0.0}
        rights = recursion(approach, momentum, map(of_batch, drawn))
        for x, (used, remembered) in zip(drawn, rights, strict=True):
            y, state = call(layer, jax.numpy.asarray(x), state)
            worst["training"] = max(worst["training"], error(y, x, used))
            y, _ = call(inference, jax.numpy.asarray(x), state)
            worst["inference"] = max(worst["inference"], error(y, x, remembered))
        for use, largest in worst.items():
            measured[Run(approach, momentum, ratio, use)] = largest
    return measured


def report(measured: Measured) -> tuple[str, list[Verdict]]:
    """Returns the tables for the terminal and the README, and the verdict."""
    largest = max(measured, key=lambda run: measured[run])
    worst = (
        f"{measured[largest]:.1e} ({largest.approach}, {largest.use}, mean/std = {largest.at})"
    )
    verdicts = [Verdict(CLAIM, worst, measured[largest] <= Y)]
    return f"{_table(measured)}\n\n{claims_table(verdicts)}", verdicts


def _table(measured: Measured) -> str:
    """Returns one row for each approach and use, the worst over momenta."""
    ratios = list(dict.fromkeys(run.at for run in measured))
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for of, largest in measured.items():
        row = rows.setdefault((of.approach, of.use), {})
        row[of.at] = max(row.get(of.at, 0.0), largest)
    header = ("largest error of y", *(f"mean/std = {ratio}" for ratio in ratios))
    return results.table(
        header,
        [
            (f"{approach}, {use}", *(f"{row[ratio]:.1e}" for ratio in ratios))
            for (approach, use), row in rows.items()
        ],
    )


def save(path: Path, measured: Measured) -> None:
    rows = [
        (of.approach, of.momentum, f"{of.ratio:g}", of.use, text(largest))
        for of, largest in measured.items()
    ]
    results.write_csv(path, HEADER, rows)


def load(path: Path) -> Measured:
    """Returns what `save` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        Run(row["approach"], float(row["momentum"]), float(row["mean/std"]), row["use"]): float(
            row["error"]
        )
        for row in rows
    }
