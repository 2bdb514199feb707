"""Tells whether all that is timed computes the same, compared with NumPy in float64.

A race between programs with different results has no winner.
"""

import numpy as np
from numpy.typing import NDArray

from experiments.lab import exact
from experiments.lab.exact import Answer, Batch

from .cases import DTYPES, Problem

# The largest absolute error of y and dx, whose values are of order 1. bf16 has 8 bits: values
# up to 6 are rounded by up to 2^-6, several times on the way.
TOLERANCE = {"f32": 1e-4, "bf16": 0.1}


def numbers(problem: Problem, seed: int = 0) -> Batch:
    """Returns what every peer is given; weight and bias are f32."""
    rng = np.random.default_rng(seed)

    def normal(*size: int) -> NDArray[np.float32]:
        return rng.standard_normal(size, dtype=np.float32)

    dtype, channels = DTYPES[problem.dtype], problem.shape[1]
    x, dy = 0.3 + normal(*problem.shape), normal(*problem.shape)
    weight, bias = 1 + 0.1 * normal(channels), 0.1 * normal(channels)
    return Batch(x.astype(dtype), dy.astype(dtype), weight, bias)


class Agreement:
    """Measures how far answers to these numbers are from the exact one."""

    def __init__(self, given: Batch, problem: Problem) -> None:
        self.tolerance = TOLERANCE[problem.dtype]
        # The gradients of weight and bias are sums over so many values.
        self._values = given.x.size / given.weight.size
        if problem.rows:
            self._exact = exact.layer_norm(given, np.float64).answer
            self._sure = np.True_
            return
        before = exact.batch_norm(given, np.float64).answer.y  # the ReLU
        dy = given.dy.astype(np.float64) * (before > 0)
        answer = exact.batch_norm(given._replace(dy=dy), np.float64).answer
        self._exact = answer._replace(y=np.maximum(before, 0))
        # Around zero, rounding decides which side of the ReLU a value is on.
        self._sure = np.abs(before) > self.tolerance

    def deviation(self, found: Answer) -> float:
        """Returns the largest, over all four results; those of the sums per value summed."""
        right = self._exact
        largest = (
            np.max(np.abs(found.y - right.y)),
            np.max(np.abs(found.dx - right.dx), where=self._sure, initial=0.0),
            np.max(np.abs(found.dweight - right.dweight)) / self._values,
            np.max(np.abs(found.dbias - right.dbias)) / self._values,
        )
        return float(np.nan_to_num(np.max(largest), nan=np.inf))
