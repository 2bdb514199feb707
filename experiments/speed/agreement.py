"""Tells whether all that is timed computes the same, compared with NumPy in float64.

A race between programs with different results has no winner.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from .cases import DTYPES, Problem, Shape
from .programs import EPS

# Of y and dx, whose values are of order 1, absolutely. bf16 has 8 bits: values up to 6 are
# rounded by up to 2^-6, several times on the way.
TOLERANCE = {"f32": 1e-4, "bf16": 0.1}


class Numbers(NamedTuple):
    """Holds what every peer is given: x and dy are [N, C, *spatial], the rest [C]; f32."""

    x: NDArray[np.float32]
    dy: NDArray[np.float32]
    weight: NDArray[np.float32]
    bias: NDArray[np.float32]


class Outputs(NamedTuple):
    """Holds what every peer gives back; y and dx are [N, C, *spatial]."""

    y: NDArray[Any]
    dx: NDArray[Any]
    dweight: NDArray[Any]
    dbias: NDArray[Any]


def numbers(shape: Shape, seed: int = 0) -> Numbers:
    rng = np.random.default_rng(seed)

    def normal(*size: int) -> NDArray[np.float32]:
        return rng.standard_normal(size, dtype=np.float32)

    channels = shape[1]
    return Numbers(
        0.3 + normal(*shape), normal(*shape), 1 + 0.1 * normal(channels), 0.1 * normal(channels)
    )


class Agreement:
    """Measures how far results for these numbers are from the exact ones."""

    def __init__(self, given: Numbers, problem: Problem) -> None:
        self.tolerance = TOLERANCE[problem.dtype]
        self._exact, before = _exact(given, problem)
        # Around zero, rounding decides which side of the ReLU a value is on.
        self._sure = problem.rows | (np.abs(before) > self.tolerance)
        # The gradients of weight and bias are sums over so many values.
        self._values = given.x.size / given.weight.size

    def deviation(self, outputs: Outputs) -> float:
        """Returns the largest, over all four results; those of the sums per value summed."""
        y, dx, dweight, dbias = (
            np.abs(a - b) for a, b in zip(outputs, self._exact, strict=True)
        )
        largest = (
            y.max(),
            dx.max(where=self._sure, initial=0.0),
            dweight.max() / self._values,
            dbias.max() / self._values,
        )
        return float(np.nan_to_num(np.max(largest), nan=np.inf))


def _exact(given: Numbers, problem: Problem) -> tuple[Outputs, NDArray[np.float64]]:
    """Returns the results, and what goes into the ReLU of a batch norm."""

    def seen(values: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns the values as the peers see them, of [N, C, S]."""
        narrow = np.asarray(jnp.asarray(values).astype(DTYPES[problem.dtype]), np.float64)
        return narrow.reshape(*narrow.shape[:2], -1)

    normalised = (1,) if problem.rows else (0, 2)

    def mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values.mean(normalised, keepdims=True)

    x, dy = seen(given.x), seen(given.dy)
    weight, bias = (a.astype(np.float64)[:, None] for a in (given.weight, given.bias))
    deviation = x - mean(x)
    rstd = 1 / np.sqrt(mean(deviation**2) + EPS)
    xhat = deviation * rstd
    before = xhat * weight + bias
    y = before if problem.rows else np.maximum(before, 0)
    dz = dy if problem.rows else np.where(before > 0, dy, 0)
    g = dz * weight
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
    dweight, dbias = (dz * xhat).sum((0, 2)), dz.sum((0, 2))
    shape = problem.shape
    return Outputs(y.reshape(shape), dx.reshape(shape), dweight, dbias), before.reshape(shape)
