"""Tests that `Accumulated` remembers micro-batches as one batch.

`Frozen` is tested in `tests/models/test_freeze.py`, `Cumulative` in `test_observations.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_norm
from eqx_norm.models import reconfigure
from eqx_norm.strategies import NAMED, Accumulated, Average, Batch, Cumulative, Frozen
from tests.helpers import Cumulative as Unloaded
from tests.helpers import (
    copy,
    example,
    floats,
    make,
    normal,
    remember,
    remembered,
    same,
)
from tests.helpers import quick_call as call

C, SIZES = 3, (6, 2, 6, 2)


def micro_batches(seed: int) -> list[Any]:
    """Returns micro-batches whose means differ more than the values in a micro-batch."""
    means = normal(seed, (len(SIZES), 1, C, 1), 3, 5)
    drawn = (normal(9 * seed + i, (n, C, 5), 0, 2) for i, n in enumerate(SIZES))
    return [floats(mean + x) for mean, x in zip(means, drawn, strict=True)]


def in_turn(layer: Any, state: Any, xs: Any) -> Any:
    """Returns the outputs, and the state after all micro-batches."""
    ys = []
    for x in xs:
        y, state = call(layer, state, x)
        ys.append(y)
    return ys, state


def accumulated(approach: Any, every: int = len(SIZES), **options: Any) -> Any:
    """Returns a layer and its state, and an accumulating layer and its state."""
    layer, state = make(C, "batch", approach=approach, **options)
    return layer, state, *reconfigure(layer, state, approach=lambda s: Accumulated(s, every))


def held(layer: Any, state: Any) -> Any:
    return state.get(layer.memory_index).statistics


def assert_close(actual: Any, expected: Any, tolerance: float = 2e-6) -> None:
    """Compares all leaves except the rests of pairs, which are as small as the tolerance."""
    pairs = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        if "parts" in jax.tree_util.keystr(path):
            a, b = a[..., 0, :], b[..., 0, :]
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=5 * tolerance)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("approach", [*NAMED, Average(), Unloaded(), Cumulative()], ids=str)
def test_accumulated_remembers_micro_batches_as_one_batch(approach, unbiased):
    layer, whole, accumulating, state = accumulated(approach, unbiased=unbiased)
    for step in range(1, 4):  # each step starts from the memory of the step before
        xs = micro_batches(step)
        alone = remember(layer, copy(whole), held(accumulating, state).remembered)
        ys, state = in_turn(accumulating, state, xs)
        assert_close(ys[2], call(layer, alone, xs[2])[0], 1e-5)
        _, whole = call(layer, whole, jnp.concatenate(xs))
        memory = held(accumulating, state)
        assert_close(memory.remembered, held(layer, whole))
        assert (memory.pending.count, memory.batches) == (0, 0)
        assert state.get(accumulating.memory_index).accepted == step * len(SIZES)


@pytest.mark.nans
def test_accumulated_leaves_out_a_non_finite_micro_batch():
    *_, accumulating, state = accumulated("batch")
    first, *others = micro_batches(0)
    _, expected = in_turn(accumulating, copy(state), [first, *others])
    _, state = in_turn(accumulating, state, [first, first * jnp.nan, *others])
    assert state.get(accumulating.memory_index).rejected == 1
    assert same(held(accumulating, state), held(accumulating, expected))


@pytest.mark.parametrize("approach", ["batch", Average()], ids=str)
def test_accumulated_drops_a_pool_that_overflows(approach):
    layer, whole, accumulating, state = accumulated(approach, every=2)
    huge = 2 * float(jnp.finfo(floats([]).dtype).max) ** 0.5
    before = held(accumulating, state)
    _, state = in_turn(accumulating, state, [jnp.full((2, C), s * huge) for s in (1, -1)])
    after = held(accumulating, state)
    assert same((before.remembered, before.pending), (after.remembered, after.pending))
    assert after.batches == 0
    _, state = in_turn(accumulating, state, xs := micro_batches(0)[:2])
    _, whole = call(layer, whole, jnp.concatenate(xs))
    assert_close(remembered(accumulating, state), remembered(layer, whole))


def test_momentum_of_wrappers_and_example_of_accumulated():
    assert (Accumulated(Batch(0.3), 2).momentum, Frozen(Average()).momentum) == (0.3, None)
    names = {"Accumulated": Accumulated, "eqx_norm": eqx_norm}
    model, state = make(C, "batch", approach="batch")
    model = example(Accumulated, **names, model=model, state=state)["model"]
    assert model.approach == Accumulated(Batch(), every=4)
