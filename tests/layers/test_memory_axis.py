"""Tests `memory_axis_name`: groups that are normalised apart, and remembered together.

Over the devices of a mesh: tests/devices/over_uses.py.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, ghost_batches
from tests.helpers import copy, each_approach, example, normal, same
from tests.layers.masking import C, L, masked, step, trained, untrained

N = 12
X, DY = normal(0, (N, C, L), 1, 2), normal(1, (N, C, L))
# No group has as many values that count as another.
MASK = np.arange(N * L).reshape(N, L) % np.arange(1, N + 1)[:, None] == 0
GHOST = {"axis_name": "ghost", "memory_axis_name": "group"}
AXES = "ghost", "group"
close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)


@eqx.filter_jit
def grouped(layer, state, x=X, size=4):
    return masked(layer, *AXES)(ghost_batches(x, size), None, state)


@pytest.mark.parametrize(("mask", "unbiased"), [(None, False), (MASK, True)])
@each_approach
def test_each_group_is_normalised_alone_and_all_are_remembered(approach, unbiased, mask):
    layer, state = trained(approach, unbiased=unbiased, **GHOST)
    one, _ = trained(approach, unbiased=unbiased)
    groups = ghost_batches((X, mask, DY), 4)
    y, after, *gradients, dx = step(layer, state, *groups, AXES)
    members = (jax.tree.map(lambda group, i=i: group[i], groups) for i in range(3))
    apart = [step(one, copy(state), *member) for member in members]
    close(y, jnp.stack([y for y, *_ in apart]))
    close(dx, jnp.stack([dx for *_, dx in apart]))
    for i, gradient in enumerate(gradients):
        close(gradient, sum(outputs[2 + i] for outputs in apart), atol=2e-5)
    jax.tree.map(close, after, step(one, copy(state), X, mask, DY)[1])


@pytest.mark.nans
def test_a_group_that_is_not_finite():
    """It is one batch that is remembered, or not."""
    layer, state = untrained("batch", **GHOST)
    _, state = grouped(layer, state)
    y, after = grouped(layer, copy(state), X.at[5].set(jnp.nan))
    assert np.isfinite(y[::2]).all()
    assert np.isnan(y[1]).all()
    before, after = (s.get(layer.memory_index) for s in (state, after))
    assert same(before.statistics, after.statistics)
    assert (after.counts - before.counts).tolist() == [0, 1]


@pytest.mark.x32
def test_the_example():
    names = {"eqx": eqx, "jax": jax, "BatchNorm": BatchNorm, "ghost_batches": ghost_batches}
    names = example(ghost_batches, x=normal(0, (64, 16, 3)), **names)
    assert names["y"].shape == names["x"].shape
    close(names["y"][:32].mean((0, 2)), np.zeros(16))
