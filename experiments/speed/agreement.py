"""Tells whether all that is timed computes the same, compared with NumPy in float64.

A race between programs with different results has no winner.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np

from experiments.lab import exact
from experiments.lab.exact import Answer, Batch

from .cases import Problem, Shape
from .programs import drawn

# The largest absolute error of y and dx, whose values are of order 1. bf16 has 8 bits: values
# up to 6 are rounded by up to 2^-6, several times on the way.
TOLERANCE = {"f32": 1e-4, "bf16": 0.1}


class Case(NamedTuple):
    """Holds what a layer is given, and what it should give."""

    given: Batch
    right: Answer

    def deviation(self, found: Answer) -> float:
        """Returns the largest deviation, over all four results.

        The gradients of weight and bias are sums, whose deviation counts per value summed.
        """
        right, summed = self.right, self.given.x.size / self.given.weight.size
        off_y, off_dx = (
            np.abs(values.reshape(exactly.shape) - exactly)
            for values, exactly in ((found.y, right.y), (found.dx, right.dx))
        )
        largest = (
            np.max(off_y),
            np.max(off_dx),
            np.max(np.abs(found.dweight - right.dweight)) / summed,
            np.max(np.abs(found.dbias - right.dbias)) / summed,
        )
        return float(np.nan_to_num(np.max(largest), nan=np.inf))


@functools.lru_cache(2)  # the peers on one array share it
def case(problem: Problem, shape: Shape) -> Case:
    """Returns the case of a layer that is given x in this shape; weight and bias are f32."""
    ((x, dy),) = drawn(shape, problem.dtype)
    normal = jax.random.normal(jax.random.key(1), (2, problem.shape[1]))
    weight, bias = 0.1 * np.asarray(normal)
    given = batch = Batch(np.asarray(x), np.asarray(dy), 1 + weight, bias)
    if problem.rows:
        return Case(given, exact.layer_norm(batch, np.float64).answer)
    if shape != problem.shape:  # its channels are last
        flat = batch.x.reshape(-1, weight.size), batch.dy.reshape(-1, weight.size)
        batch = batch._replace(x=flat[0], dy=flat[1])
    before = exact.batch_norm(batch, np.float64).answer.y  # the ReLU
    # Where rounding decides on which side of the ReLU a value is, nothing comes back.
    sure = np.abs(before) > TOLERANCE[problem.dtype]
    given = given._replace(dy=np.where(sure.reshape(given.dy.shape), given.dy, 0))
    dy = batch.dy.astype(np.float64) * (sure & (before > 0))
    right = exact.batch_norm(batch._replace(dy=dy), np.float64).answer
    return Case(given, right._replace(y=np.maximum(before, 0)))
