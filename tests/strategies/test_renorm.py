"""Tests Batch Renormalisation, https://arxiv.org/abs/1702.03275, in a layer.

test_recursions.py tests the formula over many steps, tests/operation its derivatives.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.strategies import Batch, Renorm
from tests.helpers import call_and_grad, f32, make, normal, same

pytestmark = pytest.mark.x32  # the values are chosen for float32
C, MOMENTUM = 3, 0.9
DY = normal(1, (6, C, 4))

CLOSED = Renorm(MOMENTUM)
TOO_SMALL = Renorm(MOMENTUM, lambda step: 1.0 - step, lambda step: -1.0 * step)
OPEN = Renorm(MOMENTUM, r_max=3.0, d_max=5.0)


@pytest.mark.parametrize(
    ("approach", "batches"),
    [(CLOSED, 1), (TOO_SMALL, 1), (OPEN, 0)],
    ids=["closed", "bounds too small", "at the first batch"],
)
def test_renorm_equals_batch_to_the_bit_if_closed_or_at_the_first_batch(approach, batches):
    x = 1e4 + f32([[1e-3], [1.0], [30.0]]) * normal(0, DY.shape)
    results = []
    for strategy in (approach, Batch(MOMENTUM)):
        layer, state = make(C, "batch", approach=strategy)
        for _ in range(batches):  # move the memory far away from x
            _, state, _ = call_and_grad(layer, state, normal(2, DY.shape), DY)
        y, state, (gradient, dx) = call_and_grad(layer, state, x, DY)
        results.append((y, gradient.weight, gradient.bias, dx, state))
    assert same(*results)


PUBLISHED = (Renorm(), [(0, 1, 0), (5_000, 1, 0), (15_000, 11 / 7, 2.5), (40_000, 3, 5)])
CROSSQ = (Renorm.crossq(), [(0, 1, 0), (99_999, 1, 0), (100_000, 3, 5), (2**31 - 1, 3, 5)])


@pytest.mark.parametrize(("strategy", "bounds"), [PUBLISHED, CROSSQ], ids=["paper", "CrossQ"])
def test_renorm_published_schedules(strategy, bounds):
    for step, *expected in bounds:
        actual = [bound(jnp.int32(step)) for bound in (strategy.r_max, strategy.d_max)]
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
