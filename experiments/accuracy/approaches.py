"""Measures how accurate each approach is, in training and inference, after many steps.

The statistics that normalise are then running averages, over batches whose mean and variance
change from step to step, and are compared with the same recursion in extended precision.
Errors are of y, in units of max(1, abs(xhat)).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray
from tqdm import tqdm

from eqx_norm import BatchNorm
from eqx_norm.strategies import AbstractStrategy, Adam, Batch, Ema, SmoothStart, VarianceClip
from experiments.lab.exact import EPS
from experiments.lab.rows import by
from experiments.lab.tables import grid

from . import recursions
from .cases import CHANNELS, power
from .recursions import Recursion

EXAMPLES, VALUES = 16, 4
# How each approach is made with a momentum, and what it is compared with.
APPROACHES: dict[str, tuple[Callable[[float], AbstractStrategy], Recursion]] = {
    "ema": (Ema, recursions.ema),
    "batch": (Batch, recursions.batch),
    "adam": (Adam, recursions.adam),
    "smooth_start": (SmoothStart, recursions.smooth_start),
    "variance_clip": (
        lambda momentum: VarianceClip(Batch(momentum), ratio=4.0, start=5),
        recursions.variance_clip(recursions.batch, ratio=4.0, start=5),
    ),
}


@dataclass(frozen=True)
class Job:
    steps: int = 300
    ratios: tuple[float, ...] = (1.0, 1e3, 1e5, 1e7)
    momenta: tuple[float, ...] = (0.5, 0.99)
    approaches: tuple[str, ...] = tuple(APPROACHES)


WHOLE = Job()
QUICK = Job(steps=30, ratios=(1.0, 1e7), momenta=(0.99,))


class Row(NamedTuple):
    approach: str
    momentum: float
    ratio: float  # of mean and standard deviation
    use: str  # "training" or "inference"
    error: float  # the largest over all steps


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


def moments(x: NDArray) -> tuple[NDArray, NDArray]:
    """Returns the mean and the variance of each channel, in extended precision."""
    wide = x.astype(np.longdouble)
    return wide.mean((0, 2)), wide.var((0, 2))


def error(y: ArrayLike, x: NDArray, right: Sequence[NDArray]) -> float:
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


def measure(job: Job) -> list[Row]:
    """Returns the largest errors; inference is on the batch just trained on."""
    rows = []
    kinds = [*itertools.product(job.approaches, job.momenta, job.ratios)]
    for approach, momentum, ratio in tqdm(kinds, unit="run", disable=None):
        strategy, recursion = APPROACHES[approach]
        layer, state = eqx.nn.make_with_state(BatchNorm)(
            CHANNELS, "batch", eps=EPS, approach=strategy(momentum)
        )
        inference = eqx.nn.inference_mode(layer)
        drawn = list(batches(ratio, job.steps))
        rights = recursion(map(moments, drawn), np.longdouble(momentum))
        worst = {"training": 0.0, "inference": 0.0}
        for x, (used, remembered) in zip(drawn, rights, strict=True):
            y, state = _call(layer, jnp.asarray(x), state)
            worst["training"] = max(worst["training"], error(y, x, used))
            y, _ = _call(inference, jnp.asarray(x), state)
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
