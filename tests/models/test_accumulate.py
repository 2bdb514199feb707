"""Tests that micro-batches are remembered once, as the batch that they are together."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from eqx_norm.models import accumulate, reconfigure, unswap, update_once
from eqx_norm.models._layers import entries
from eqx_norm.strategies import Accumulated, Batch, VarianceClip
from tests.compiling import filter_jit
from tests.helpers import APPROACHES, Cumulative, example, make, normal, over_batch, same
from tests.helpers import quick_call as call

C, MICRO, N, T = 3, 4, 6, 5
MASK = np.arange(T) < np.random.RandomState(7).randint(2, T + 1, (MICRO, N))[..., None]
MASK[1, :5] = False  # a micro-batch of far fewer values
MASK[2] = False  # and one of none


def batch(seed: int) -> Any:
    """Returns micro-batches whose means differ by more than their values do."""
    apart = normal(seed + 1, (MICRO, 1, C, 1), 0, 5)
    return normal(seed, (MICRO, N, C, T), 3, 2) + apart


def masked(norm: Any, state: Any, x: Any, mask: Any) -> Any:
    def one(x, mask, state):
        return norm(x, state, mask=mask)

    return jax.vmap(one, (0, 0, None), (0, None), axis_name="batch")(x, mask, state)


def scanned(norm: Any, state: Any, xs: Any, masks: Any) -> Any:
    """Returns outputs, and the state after all micro-batches and one update."""

    def step(state, x_and_mask):
        y, state = masked(norm, state, *x_and_mask)
        return state, y

    state, ys = jax.lax.scan(step, state, (xs, masks))
    return ys, update_once(norm, state)


micro_batches, one_batch, update = map(filter_jit, (scanned, masked, update_once))


def learnt(norm: Any, state: Any) -> Any:
    """Returns the wrapped strategy's memory, without rests, and the counts."""
    memory = state.get(norm.memory_index).remembered
    return (memory.mean, memory.variance, memory.weight), counts(norm, state)


def counts(norm: Any, state: Any) -> tuple[int, int]:
    return int(state.get(norm.accepted_index)), int(state.get(norm.rejected_index))


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("approach", APPROACHES)
def test_is_one_pooled_batch(approach, unbiased):
    norm, state = make(C, "batch", momentum=0.7, approach=approach, unbiased=unbiased)
    collecting, collected = accumulate(norm, state)
    for step in range(2):  # the second begins where the first has ended
        xs, mask = batch(step), MASK if step else np.ones_like(MASK)
        ys, collected = micro_batches(collecting, collected, xs, mask)
        flat = xs.reshape(-1, C, T), mask.reshape(-1, T)
        _, state = one_batch(norm, state, *flat)
        memory = state.get(norm.memory_index)
        ours, accepted = learnt(collecting, collected)
        for a, b in zip(ours, (memory.mean, memory.variance, memory.weight), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        # And as NumPy says.
        assert accepted == counts(norm, state) == (step + 1, 0)
        if not step and approach == "batch":
            values = np.asarray(xs, np.float64).transpose(2, 0, 1, 3).reshape(C, -1)
            right = values.mean(1), values.var(1, ddof=int(unbiased))
            np.testing.assert_allclose(ours[:2], right, rtol=1e-6)
            alone = masked(norm, make(C, "batch", approach=approach)[1], xs[0], mask[0])[0]
            np.testing.assert_allclose(ys[0], alone, atol=1e-6)
    np.testing.assert_array_equal(collected.get(collecting.memory_index).pending.count, 0)


def test_nothing_is_learnt_before():
    norm, state = make(C, "batch", approach="ema")
    _, state = call(norm, state, batch(0)[0])
    norm, state = accumulate(norm, state)
    before = state.get(norm.memory_index)
    y, state = call(norm, state, batch(1)[0])
    after = state.get(norm.memory_index)
    assert same(before.remembered, after.remembered)
    assert after.batches == 1
    # It is normalised by what it would have become, as "ema" says.
    other, other_state = reconfigure(norm, state, approach="ema")
    np.testing.assert_allclose(y, call(other, other_state, batch(1)[0])[0], atol=1e-6)
    assert same(state.get(norm.memory_index), after)


def test_without_micro_batches_nothing_changes():
    norm, state = accumulate(*make(C, "batch", approach="batch", unbiased=True))
    assert eqx.tree_equal(update(norm, state), state)
    _, state = call(norm, state, batch(0)[0])
    state = update(norm, state)
    assert eqx.tree_equal(update(norm, state), state)


def test_what_is_not_finite_is_left_out():
    norm, state = accumulate(*make(C, "batch", approach="batch"))
    xs = batch(0)
    _, right = micro_batches(norm, state, xs[:2], np.ones_like(MASK[:2]))
    _, state = micro_batches(norm, state, xs.at[2:].set(jnp.nan), np.ones_like(MASK))
    assert counts(norm, state) == (1, 2)
    assert same(state.get(norm.memory_index), right.get(norm.memory_index))


def test_pooled_moments_that_overflow_are_rejected():
    norm, state = accumulate(*make(C, "batch", approach="batch"))
    huge = float(jnp.finfo(jnp.result_type(float)).max) ** 0.5
    for sign in (1, -1):
        _, state = call(norm, state, jnp.full((2, C), sign * 2 * huge))
    before = state.get(norm.memory_index).remembered
    state = update(norm, state)
    assert counts(norm, state) == (0, 1)
    assert same(state.get(norm.memory_index).remembered, before)


def test_clipping_starts_after_so_many_updates():
    approach = VarianceClip(Batch(0.9), ratio=1.1, start=1)
    norm, state = accumulate(*make(C, "batch", approach=approach))
    small, large = (batch(0) * size for size in (1, 10))
    _, state = micro_batches(norm, state, small, np.ones_like(MASK))
    first = state.get(norm.memory_index).remembered.variance
    _, state = micro_batches(norm, state, large, np.ones_like(MASK))
    second = state.get(norm.memory_index).remembered.variance
    assert (second > first).all()
    assert (second < 2 * first).all()


def test_ensembles():
    made = eqx.filter_vmap(lambda _: make(C, "batch", approach="batch"))(jnp.zeros(2))
    norm, state = accumulate(*made)
    xs, ones = jnp.stack([batch(0), batch(5)]), np.ones_like(MASK)
    in_axes = eqx.if_array(0), 0, 0, None
    _, inside = filter_jit(eqx.filter_vmap(scanned, in_axes=in_axes))(norm, state, xs, ones)
    flat = xs.reshape(2, -1, C, T), ones.reshape(-1, T)
    _, outside = filter_jit(eqx.filter_vmap(masked, in_axes=in_axes))(norm, state, *flat)
    outside = update_once(norm, outside)
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(outside), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-5)  # of rests of some 1e-6


def test_where_begin_and_end():
    model, state = eqx.nn.make_with_state(
        lambda: [BatchNorm(C, "batch", approach=a) for a in ("batch", "ema")]
    )()
    collecting, begun = accumulate(model, state, lambda path, _: path == "[1]")
    assert [type(n.approach).__name__ for n in collecting] == ["Batch", "Accumulated"]
    assert collecting[1].momentum == 0.99
    more, more_state = accumulate(collecting, begun)
    assert more[1].approach == collecting[1].approach  # it is not wrapped twice
    assert same(update_once(more, more_state), more_state)
    ended, ended_state = reconfigure(
        more, more_state, lambda p, _: p == "[0]", approach="batch"
    )
    ended, ended_state = reconfigure(
        ended, ended_state, lambda path, _: path == "[1]", approach="ema"
    )
    assert eqx.tree_equal((ended, ended_state), (model, state))
    assert [norm.mode for norm in unswap(more, more_state)[0]] == ["batch", "ema"]


def test_any_strategy():
    norm, state = make(C, "batch", approach=Cumulative())
    collecting, collected = accumulate(norm, state)
    ones = np.ones_like(MASK)
    _, collected = micro_batches(collecting, collected, batch(0), ones)
    _, state = one_batch(norm, state, batch(0).reshape(-1, C, T), ones.reshape(-1, T))
    ours, right = collected.get(collecting.memory_index), state.get(norm.memory_index)
    np.testing.assert_allclose(ours.remembered.m2, right.m2, rtol=1e-6)
    loaded = reconfigure(*make(C, "batch", approach="batch"), approach=Accumulated(Batch(0.5)))
    assert same(loaded[1], reconfigure(*loaded, momentum=0.7)[1])


def test_the_example_in_the_docstring():
    made = eqx.nn.make_with_state(
        lambda: eqx.nn.Sequential([BatchNorm(C, "batch", approach="batch")])
    )
    model, state = made()

    def loss(model, state, x):
        y, state = over_batch(model)(x, state)
        return (y**3).sum(), state

    names = example(accumulate, **globals(), model=model, state=state, loss=loss)
    gradient, state = names["gradient"](names["model"], names["state"], batch(0))
    right = sum(
        eqx.filter_grad(loss, has_aux=True)(model, made()[1], x)[0].layers[0].weight
        for x in batch(0)
    )
    np.testing.assert_allclose(gradient.layers[0].weight, right, rtol=1e-4)
    assert counts(model.layers[0], state) == (1, 0)


def test_errors():
    norm, state = make(C, "batch", approach="batch")
    with pytest.raises(
        ValueError, match=r"^No layer of the model accumulates.*accumulate\(mod"
    ):
        update_once(norm, state)
    with pytest.raises(
        ValueError, match=r"^No BatchNorm.* `where` is false for all.*: '\[0\]'"
    ):
        accumulate([norm], state, lambda path, layer: False)
    with pytest.raises(ValueError, match=r"^No BatchNorm.*The model has none; eqx_norm.swap"):
        accumulate(eqx.nn.Linear(1, 1, key=jax.random.key(0)), state)
    collecting, _ = accumulate(norm, state)
    with pytest.raises(
        ValueError, match=r"^BatchNorm: the state given belongs to another laye"
    ):
        update_once(collecting, state)
    with pytest.raises(
        ValueError, match=r"^BatchNorm: the state given holds nothing at 'Batch"
    ):
        update_once(collecting, eqx.nn.State(jnp.zeros(1)))
    assert len(entries(state)) == 3
