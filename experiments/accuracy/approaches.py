"""Measures how accurate each approach is, in training and inference, after many steps.

The statistics that normalise are then running averages, over batches whose mean and variance
change from step to step, and are compared with the same recursion in extended precision.
Errors are of y, in units of max(1, abs(xhat)).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray
from tqdm import tqdm

from eqx_norm import BatchNorm
from eqx_norm.strategies import NAMED, AbstractStrategy, Batch, VarianceClip, named
from experiments.lab.exact import EPS
from experiments.lab.rows import by
from experiments.lab.tables import grid

from .cases import CHANNELS, power

EXAMPLES, VALUES = 16, 4
CLIP_START = 5


@dataclasses.dataclass(frozen=True)
class Job:
    steps: int = 300
    ratios: tuple[float, ...] = (1.0, 1e3, 1e5, 1e7)
    momenta: tuple[float, ...] = (0.5, 0.99)
    approaches: tuple[str, ...] = tuple(NAMED)
    implementation: Literal["auto", "xla", "device_invariant"] = "auto"


WHOLE = Job()
QUICK = Job(steps=30, ratios=(1.0, 1e7), momenta=(0.99,))


class Row(NamedTuple):
    approach: str
    momentum: float
    ratio: float  # of mean and standard deviation
    use: str  # "training" or "inference"
    error: float  # the largest over all steps


class Statistics(NamedTuple):
    """Holds mean and variance of each channel, in extended precision."""

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


Call = Callable[[BatchNorm, jax.Array, eqx.nn.State], tuple[jax.Array, eqx.nn.State]]


def measure(job: Job, call: Call = _call) -> list[Row]:
    """Returns the largest errors; inference is on the batch just trained on."""
    rows = []
    kinds = [(a, m, r) for a in job.approaches for m in job.momenta for r in job.ratios]
    for approach, momentum, ratio in tqdm(kinds, unit="run", disable=None):
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
        rows += [Row(approach, momentum, ratio, *found) for found in worst.items()]
    return rows


def table(rows: Sequence[Row]) -> str:
    """Returns one line for each approach and use, the worst over momenta."""
    of_cells = by(rows, lambda row: (row.approach, row.use, row.ratio))
    return grid(
        "largest error of y",
        {f"{row.approach}, {row.use}": (row.approach, row.use) for row in rows},
        {f"mean/std = {power(row.ratio)}": row.ratio for row in rows},
        lambda kind, ratio: f"{max(row.error for row in of_cells[*kind, ratio]):.1e}",
    )
