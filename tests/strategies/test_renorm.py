"""Tests Batch Renormalisation, https://arxiv.org/abs/1702.03275, in a layer.

test_recursions.py tests the formula over many steps, tests/operation its derivatives.
"""

import equinox as eqx
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


@pytest.mark.parametrize("steps", [0, 3])
def test_renorm_of_a_constant_channel_gives_the_bias_and_finite_gradients(steps):
    layer, state = make(C, "batch", approach=OPEN)
    layer = eqx.tree_at(lambda m: m.bias, layer, f32([0.3, -1, 2]))
    x = jnp.broadcast_to(f32([[1e-3], [121.0], [65504.0]]), DY.shape)
    for _ in range(steps):
        _, state, _ = call_and_grad(layer, state, x, DY)
    y, _, (gradient, dx) = call_and_grad(layer, state, x, DY)
    np.testing.assert_array_equal(y, np.broadcast_to(layer.bias[:, None], x.shape))
    assert np.isfinite(dx).all()
    np.testing.assert_array_equal(gradient.weight, np.zeros(C))


PUBLISHED = (Renorm(), [(0, 1, 0), (5_000, 1, 0), (15_000, 11 / 7, 2.5), (40_000, 3, 5)])
CROSSQ = (Renorm.crossq(), [(0, 1, 0), (99_999, 1, 0), (100_000, 3, 5), (2**31 - 1, 3, 5)])


@pytest.mark.parametrize(("strategy", "bounds"), [PUBLISHED, CROSSQ], ids=["paper", "CrossQ"])
def test_renorm_published_schedules(strategy, bounds):
    for step, *expected in bounds:
        actual = [bound(jnp.int32(step)) for bound in (strategy.r_max, strategy.d_max)]
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
