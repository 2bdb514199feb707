"""Tests that `Accumulated` remembers micro-batches as one batch.

`Frozen` is tested in `tests/models/test_freeze.py`, `Cumulative` in `test_observations.py`.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.models import reconfigure
from eqx_norm.strategies import Accumulated, Average, Cumulative
from tests.helpers import Cumulative as Unloaded
from tests.helpers import copy, floats, make, normal, remember, remembered, same
from tests.helpers import quick_call as call

UNOPTIMISED = True  # compares values: tests/compiling.py

C, SIZES = 3, (6, 2, 2)


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


def accumulated(approach: Any, unbiased: bool = True) -> Any:
    """Returns a layer and its state, and an accumulating layer and its state."""
    layer, state = make(C, "batch", approach=approach, unbiased=unbiased)
    wrapped = reconfigure(layer, state, approach=lambda s: Accumulated(s, every=len(SIZES)))
    return layer, state, *wrapped


def held(layer: Any, state: Any) -> Any:
    return state.get(layer.memory_index).statistics


def assert_same_memory(layer: Any, state: Any, other: Any, other_state: Any) -> None:
    actual, expected = remembered(layer, state), remembered(other, other_state)
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-5)


CASES = [("adam", True), ("renorm", False), (Average(), True), (Unloaded(), True)]
CASES += [(Cumulative(), False)]


@pytest.mark.parametrize(("approach", "unbiased"), CASES, ids=str)
def test_accumulated_remembers_micro_batches_as_one_batch(approach, unbiased):
    layer, whole, accumulating, state = accumulated(approach, unbiased=unbiased)
    for step in range(1, 4):  # each step starts from the memory of the step before
        xs = micro_batches(step)
        alone = remember(layer, copy(whole), held(accumulating, state).remembered)
        ys, state = in_turn(accumulating, state, xs)
        np.testing.assert_allclose(ys[1], call(layer, alone, xs[1])[0], rtol=1e-5, atol=5e-5)
        _, whole = call(layer, whole, jnp.concatenate(xs))
        assert_same_memory(accumulating, state, layer, whole)
        memory = held(accumulating, state)
        assert (memory.pending.count, memory.batches) == (0, 0)
        assert state.get(accumulating.memory_index).accepted == step * len(SIZES)


@pytest.mark.nans
def test_accumulated_leaves_out_a_non_finite_micro_batch():
    *_, accumulating, state = accumulated("adam")
    first, *others = micro_batches(0)
    _, expected = in_turn(accumulating, copy(state), [first, *others])
    _, state = in_turn(accumulating, state, [first, first * jnp.nan, *others])
    assert state.get(accumulating.memory_index).rejected == 1
    assert same(held(accumulating, state), held(accumulating, expected))


def test_accumulated_drops_a_pool_that_overflows():
    layer, whole, accumulating, state = accumulated(Average())
    huge = 2 * float(jnp.finfo(floats([]).dtype).max) ** 0.5
    before, xs = held(accumulating, state), micro_batches(0)
    opposite = [jnp.full_like(x, s * huge) for x, s in zip(xs, (1, -1, 1), strict=True)]
    _, state = in_turn(accumulating, state, opposite)
    after = held(accumulating, state)
    assert same((before.remembered, before.pending), (after.remembered, after.pending))
    assert after.batches == 0
    _, state = in_turn(accumulating, state, xs)
    _, whole = call(layer, whole, jnp.concatenate(xs))
    assert_same_memory(accumulating, state, layer, whole)
