"""Tests `Accumulated`, whose micro-batches are one batch, and `Cumulative`, which forgets none.

`Frozen` is tested where models are frozen, in `tests/models/test_freeze.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_norm
from eqx_norm.models import reconfigure
from eqx_norm.strategies import NAMED, Accumulated, Average, Batch, Cumulative, Frozen, Moments
from tests.helpers import Cumulative as Unloaded
from tests.helpers import (
    at_step,
    copy,
    exact,
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
    """Returns micro-batches whose means differ by more than their values do."""
    means = normal(seed, (len(SIZES), 1, C, 1), 3, 5)
    drawn = (normal(9 * seed + i, (n, C, 5), 0, 2) for i, n in enumerate(SIZES))
    return [floats(mean + x) for mean, x in zip(means, drawn, strict=True)]


def in_turn(layer: Any, state: Any, xs: Any) -> Any:
    """Returns outputs, and the state after all micro-batches."""
    ys = []
    for x in xs:
        y, state = call(layer, state, x)
        ys.append(y)
    return ys, state


def accumulated(approach: Any, every: int = len(SIZES), **options: Any) -> Any:
    """Returns a layer and its state, and the same that accumulates."""
    layer, state = make(C, "batch", approach=approach, **options)
    return layer, state, *reconfigure(layer, state, approach=lambda s: Accumulated(s, every))


def held(layer: Any, state: Any) -> Any:
    return state.get(layer.memory_index).statistics


def assert_close(actual: Any, expected: Any, tolerance: float = 2e-6) -> None:
    """Compares all but the rests, which are of the order of what is allowed."""
    pairs = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        if "parts" in jax.tree_util.keystr(path):
            a, b = a[..., 0, :], b[..., 0, :]
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=5 * tolerance)


# --- Accumulated


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("approach", [*NAMED, Average(), Unloaded(), Cumulative()], ids=str)
def test_micro_batches_are_remembered_as_the_batch_that_they_are_together(approach, unbiased):
    layer, whole, accumulating, state = accumulated(approach, unbiased=unbiased)
    for step in range(1, 4):  # the next begins where the one before has ended
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
def test_a_micro_batch_that_is_not_finite_is_left_out():
    *_, accumulating, state = accumulated("batch")
    first, *others = micro_batches(0)
    _, expected = in_turn(accumulating, copy(state), [first, *others])
    _, state = in_turn(accumulating, state, [first, first * jnp.nan, *others])
    assert state.get(accumulating.memory_index).rejected == 1
    assert same(held(accumulating, state), held(accumulating, expected))


@pytest.mark.parametrize("approach", ["batch", Average()], ids=str)
def test_a_pool_that_overflows_is_dropped(approach):
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


def test_momentum_and_example():
    assert (Accumulated(Batch(0.3), 2).momentum, Frozen(Average()).momentum) == (0.3, None)
    names = {"Accumulated": Accumulated, "eqx_norm": eqx_norm}
    model, state = make(C, "batch", approach="batch")
    model = example(Accumulated, **names, model=model, state=state)["model"]
    assert model.approach == Accumulated(Batch(), every=4)


# --- Cumulative


@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("sizes", [(300,), (100, 200), (1,) * 300], ids=len)
@pytest.mark.filterwarnings("ignore:.* hold one value per channel")
def test_it_remembers_all_values_however_they_were_cut(sizes, mean):
    drift = np.linspace(0, 2, 300)[:, None]
    x = np.asarray(floats(np.asarray(normal(0, (300, C), mean)) + drift))
    layer, state = make(C, "batch", approach=Cumulative())
    for part in np.split(x, np.cumsum(sizes)[:-1]):
        _, state = call(layer, state, jnp.asarray(part))
    actual, expected = remembered(layer, state), np.asarray(x, np.longdouble)
    ulp = float(np.finfo(x.dtype).eps)
    np.testing.assert_allclose(actual[0], expected.mean(0), rtol=2 * ulp, atol=4 * ulp)
    np.testing.assert_allclose(actual[1], expected.var(0), rtol=16 * ulp)


def test_no_value_is_lost_past_2_to_the_24():
    """There a float32 stops counting by ones, and m2 stops growing."""
    zero, one, memory = floats(np.zeros(C)), floats(np.ones(C)), Cumulative().init(C, float)
    update = jax.jit(lambda batch, memory: Cumulative().update(at_step(0, batch), memory)[1])
    for n in (2.0**24, *[1.0] * 41):
        memory = update(Moments(floats(n), zero, n * one), memory)
    for pair in (memory.count_pair, memory.m2_pair):
        assert (exact(pair) == 2**24 + 41).all()
