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
from tests.compiling import filter_jit
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

C, MICRO, N, T = 3, 4, 6, 5
MASK = np.arange(T) < np.random.RandomState(7).randint(2, T + 1, (MICRO, N))[..., None]
MASK[1, :5] = False  # a micro-batch of far fewer values
FULL = np.ones_like(MASK)


def micro_batches(seed: int) -> Any:
    """Returns micro-batches whose means differ by more than their values do."""
    apart = normal(seed + 1, (MICRO, 1, C, 1), 0, 5)
    return floats(normal(seed, (MICRO, N, C, T), 3, 2) + apart)


@filter_jit
def masked(norm: Any, state: Any, x: Any, mask: Any) -> Any:
    def one(x, mask, state):
        return norm(x, state, mask=mask)

    return jax.vmap(one, (0, 0, None), (0, None), axis_name="batch")(x, mask, state)


def in_turn(norm: Any, state: Any, xs: Any, masks: Any) -> Any:
    """Returns outputs, and the state after all micro-batches."""
    ys = []
    for x, mask in zip(xs, masks, strict=True):
        y, state = masked(norm, state, x, mask)
        ys.append(y)
    return ys, state


def pair(approach: Any, every: int = MICRO, **kwargs: Any) -> Any:
    """Returns a layer and its state, and the same that accumulates."""
    norm, state = make(C, "batch", approach=approach, **kwargs)
    return norm, state, *reconfigure(norm, state, approach=lambda s: Accumulated(s, every))


def assert_close(ours: Any, right: Any, tolerance: float = 2e-6) -> None:
    """Compares all but the rests, which are of the order of what is allowed."""
    for (path, a), b in zip(
        jax.tree.leaves_with_path(ours), jax.tree.leaves(right), strict=True
    ):
        if "parts" in jax.tree_util.keystr(path):
            a, b = a[..., 0, :], b[..., 0, :]
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=5 * tolerance)


def counts(norm: Any, state: Any) -> list[int]:
    return state.get(norm.memory_index).counts.tolist()


# --- Accumulated


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("approach", [*NAMED, Average(), Unloaded(), Cumulative()], ids=str)
def test_micro_batches_are_remembered_as_the_batch_that_they_are_together(approach, unbiased):
    norm, right, collecting, state = pair(approach, unbiased=unbiased)
    for step in range(3):  # the next begins where the one before has ended
        xs, masks = micro_batches(step), MASK if step else FULL
        held = state.get(collecting.memory_index).statistics.remembered
        ys, state = in_turn(collecting, state, xs, masks)
        alone = remember(norm, copy(right), held)
        assert_close(ys[2], masked(norm, alone, xs[2], masks[2])[0], 1e-5)
        x, mask = xs.reshape(-1, C, T), masks.reshape(-1, T)
        _, right = masked(norm, right, x, mask)
        memory = state.get(collecting.memory_index).statistics
        assert_close(memory.remembered, right.get(norm.memory_index).statistics)
        assert (memory.pending.count, memory.batches) == (0, 0)
        assert counts(collecting, state) == [(step + 1) * MICRO, 0]


def test_micro_batches_that_are_not_finite_or_empty_are_left_out():
    *_, collecting, state = pair("batch")
    xs = micro_batches(0)
    _, right = in_turn(collecting, state, xs, FULL)
    others = jnp.concatenate([xs[:2], xs[:1] * jnp.nan, xs[:1], xs[2:]])
    masks = np.concatenate([FULL[:2], FULL[:1], FULL[:1] & False, FULL[2:]])
    _, state = in_turn(collecting, state, others, masks)
    assert counts(collecting, state) == [MICRO, 1]
    assert same(*(s.get(collecting.memory_index).statistics for s in (state, right)))


@pytest.mark.parametrize("approach", ["batch", Average()], ids=str)
def test_a_pool_that_overflows_is_dropped(approach):
    norm, right, collecting, state = pair(approach, every=2)
    huge = float(jnp.finfo(floats([]).dtype).max) ** 0.5
    before = state.get(collecting.memory_index).statistics
    for sign in (1, -1):
        _, state = call(collecting, state, jnp.full((2, C), sign * 2 * huge))
    after = state.get(collecting.memory_index).statistics
    assert same((before.remembered, before.pending), (after.remembered, after.pending))
    assert after.batches == 0
    for x in micro_batches(0)[:2]:
        _, state = call(collecting, state, x)
    _, right = call(norm, right, micro_batches(0)[:2].reshape(-1, C, T))
    assert_close(remembered(collecting, state), remembered(norm, right))


def test_momentum_load_error_and_example():
    assert (Accumulated(Batch(0.3), 2).momentum, Frozen(Average()).momentum) == (0.3, None)
    with pytest.raises(ValueError, match="^every=0: it is the number of micro-batches"):
        Accumulated(Batch(), every=0)
    names = {"Accumulated": Accumulated, "eqx_norm": eqx_norm}
    model, state = make(C, "batch", approach="batch")
    model = example(Accumulated, **names, model=model, state=state)["model"]
    assert model.approach == Accumulated(Batch(), every=4)


# --- Cumulative


@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("sizes", [(300,), (100, 200), (1,) * 300], ids=len)
def test_it_remembers_all_values_however_they_were_cut(sizes, mean):
    x = np.asarray(floats(normal(0, (300, C), mean, 1)))
    drift = np.linspace(0, 2, 300)[:, None].astype(x.dtype)
    cut = np.split(x + drift, np.cumsum(sizes)[:-1])
    layer, state = make(C, "batch", approach=Cumulative())
    for part in cut:
        _, state = call(layer, state, jnp.asarray(part))
    ours, right = remembered(layer, state), np.asarray(x + drift, np.longdouble)
    ulp = float(np.finfo(x.dtype).eps)
    np.testing.assert_allclose(ours[0], right.mean(0), rtol=2 * ulp, atol=4 * ulp)
    np.testing.assert_allclose(ours[1], right.var(0), rtol=16 * ulp)


def test_no_value_is_lost_past_2_to_the_24():
    """There a float32 stops counting by ones, and m2 stops growing."""
    zero, one, memory = floats(np.zeros(C)), floats(np.ones(C)), Cumulative().init(C, float)
    update = jax.jit(lambda batch, memory: Cumulative().update(at_step(0, batch), memory)[1])
    for n in (2.0**24, *[1.0] * 41):
        memory = update(Moments(floats(n), zero, n * one), memory)
    for pair in (memory.count_pair, memory.m2_pair):
        assert (exact(pair) == 2**24 + 41).all()
