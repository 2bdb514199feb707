"""Tests that pooled statistics are those of all data, and that the rest of a state is kept."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.models import freeze, pool_statistics
from eqx_norm.models._layers import entries
from eqx_norm.strategies import NAMED, Accumulated, Average, Batch, Cumulative
from tests.helpers import Cumulative as Unloaded
from tests.helpers import Loading, copy, floats, make, normal, remembered, same
from tests.helpers import quick_call as call
from tests.models.nested import OURS, THEIRS, C, donatable, forward, made, norm

UNOPTIMISED = True  # compares values: tests/compiling.py

SIZES = (16, 8, 24)
MEANS = (0.0, 5.0, 10.0)
# Batches of clients, whose means differ by more than their standard deviations of 1 to 3.
BATCHES = [normal(i, (n, C), MEANS[i], i + 1.0) for i, n in enumerate(SIZES)]
APPROACHES: list[Any] = [*NAMED, Average(), Accumulated(Batch(), 1), Cumulative(), Loading()]


def trained(approach: Any = "batch", **settings: Any) -> tuple[Any, list[eqx.nn.State]]:
    """Returns a layer, and the state of each client after one batch, which are its moments."""
    layer, state = make(C, "batch", approach=approach, **settings)
    return layer, [call(layer, copy(state), floats(x))[1] for x in BATCHES]


def check(layer: Any, state: Any, batches: Any, ddof: int = 0) -> None:
    """Compares with mean and variance in float64, to 8 ulp of the variance."""
    x = np.concatenate(batches).astype(np.float64)
    mean, variance = remembered(layer, state)
    np.testing.assert_allclose(mean, x.mean(0), rtol=0, atol=1e-6 * x.std())
    np.testing.assert_allclose(variance, x.var(0, ddof=ddof), rtol=1e-6)


@pytest.mark.parametrize(
    ("approach", "unbiased"), [(a, i % 2 == 0) for i, a in enumerate(APPROACHES)], ids=str
)
def test_pooled_statistics_are_those_of_all_values_together(approach, unbiased):
    layer, states = trained(approach, unbiased=unbiased)
    before = [entries(state) for state in states]
    state = pool_statistics(layer, iter(states), iter(SIZES))
    check(layer, state, BATCHES, int(unbiased))
    held = state.get(layer.memory_index)
    assert held.counts.dtype == jnp.int32
    assert held.counts.tolist() == [3, 0]
    assert donatable((layer, state))
    assert same([entries(state) for state in states], before)  # the states stay valid
    call(layer, state, floats(BATCHES[0]))


def test_an_average_of_states_lacks_the_variance_between_means():
    layer, states = trained()
    pooled = pool_statistics(layer, states, SIZES)
    average = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *states)
    statistics = layer.approach.infer(average.get(layer.memory_index).statistics)
    assert (statistics.variance < 0.3 * remembered(layer, pooled)[1]).all()


def test_memories_that_know_their_number_of_values_are_weighed_by_it():
    layer, states = trained(Cumulative())
    state = pool_statistics(layer, states, [1, 1000, 1])
    check(layer, state, BATCHES)
    _, state = call(layer, state, floats(BATCHES[1]))
    check(layer, state, [*BATCHES, BATCHES[1]])


def test_only_ratios_of_values_matter_to_a_running_average():
    layer, states = trained()
    state = pool_statistics(layer, states, np.array(SIZES) / 48)
    check(layer, state, BATCHES)


def test_clients_that_have_seen_no_batch_do_not_count():
    layer, states = trained()
    new = make(C, "batch", approach="batch")[1]
    _, rejecting = call(layer, copy(new), floats(np.full((4, C), np.nan)))
    state = pool_statistics(layer, [new, *states, rejecting], [99, *SIZES, 99])
    check(layer, state, BATCHES)
    assert state.get(layer.memory_index).counts.tolist() == [3, 1]
    state = pool_statistics(layer, [new, rejecting], [1, 2])
    assert state.get(layer.memory_index).counts.tolist() == [0, 1]
    _, state = call(layer, state, floats(BATCHES[0]))  # the first batch has the whole weight
    check(layer, state, BATCHES[:1])


def test_entries_that_are_equal_in_all_states_are_kept_to_the_bit():
    layer, (state, *_) = trained()
    for model in (layer, freeze(layer)):
        assert same(pool_statistics(model, [state, copy(state)], [3, 7]), state)
    assert same(pool_statistics(layer, [state], [3]), state)


@pytest.mark.parametrize("weights", [False, True])
def test_statistics_of_frozen_layers_are_pooled_where_they_differ(weights):
    layer, states = trained()
    frozen = freeze(layer, weights=weights)
    state = pool_statistics(frozen, states, SIZES)
    assert same(state, pool_statistics(layer, states, SIZES))


def test_pending_micro_batches_are_dropped():
    layer, states = trained(Accumulated(Batch(), 2))
    once = [call(layer, copy(s), floats(x))[1] for s, x in zip(states, BATCHES, strict=True)]
    pending = [call(layer, copy(s), floats(x))[1] for s, x in zip(once, BATCHES, strict=True)]
    state = pool_statistics(layer, pending, SIZES)
    check(layer, state, BATCHES)
    assert state.get(layer.memory_index).accepted == 3  # batches of two micro-batches


def test_each_member_of_an_ensemble_is_pooled():
    models, state = made(norm, OURS, members=2)
    batches = [np.stack([x, 3 * x + 1]) for x in BATCHES]
    states = [forward(models, copy(state), x)[1] for x in batches]
    # The first member of the last client has seen no batch.
    new = jax.tree.map(lambda old, new: new.at[0].set(old[0]), state, states[-1])
    pooled = pool_statistics(models, [*states[:2], new], SIZES)
    member = [np.concatenate([x[i] for x in batches[: 2 + i]]) for i in range(2)]
    mean, variance = remembered(models, pooled)
    np.testing.assert_allclose(mean, [x.mean(0) for x in member], rtol=1e-5)
    np.testing.assert_allclose(variance, [x.var(0) for x in member], rtol=1e-5)
    assert pooled.get(models.memory_index).accepted.tolist() == [2, 3]


def test_counts_end_at_the_largest_int32():
    layer, states = trained(Average())
    states = [
        s.set(
            layer.memory_index, held._replace(counts=jnp.array([2**31 - 5, 2**30], jnp.int32))
        )
        for s in states
        for held in [s.get(layer.memory_index)]
    ]
    state = pool_statistics(layer, states, SIZES)
    assert state.get(layer.memory_index).counts.tolist() == [2**31 - 1] * 2


def test_complex_statistics():
    layer, state = make(C, "batch", approach="batch", dtype=jnp.complex64)
    batches = [np.asarray(x) * (1 + 2j) for x in BATCHES]
    states = [call(layer, copy(state), jnp.asarray(x, complex))[1] for x in batches]
    mean, variance = remembered(layer, pool_statistics(layer, states, SIZES))
    x = np.concatenate(batches)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(variance, x.var(0), rtol=1e-6)


def several(nn: Any, key: Any) -> Any:
    linear = eqx.nn.SpectralNorm(eqx.nn.Linear(C, C, key=key), "weight", key=key)
    return [linear, norm(nn), {"last": norm(nn)}]


def test_entries_of_other_layers_must_be_equal():
    model, state = made(several, OURS)
    states = [forward(model, copy(state), x)[1] for x in BATCHES]
    _, longer = forward(model, copy(states[0]), BATCHES[0])
    with pytest.raises(ValueError, match=r"^\[0\]\.uv_index: the states differ .*\.set\("):
        pool_statistics(model, [longer, *states], [1, *SIZES])
    after = pool_statistics(model, states, SIZES)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert same(after.get(model[0].uv_index), states[0].get(model[0].uv_index))
    assert not same(after.get(model[0].uv_index), state.get(model[0].uv_index))
    inputs = [forward(model[:1], copy(state), x)[0] for x in BATCHES]
    check(model[1], after, inputs)
    assert after.get(model[2]["last"].memory_index).accepted == 3


OTHER = made(norm, THEIRS)
NEW, STATE = make(C, "batch", approach="batch")
UNBIASED, SHARES = trained(unbiased=True), (0.5, 0.2, 0.3)
UNLOADED, PAIR = trained(Unloaded()), trained()[1][:2]
WIDER = make(C + 1, "batch", approach="batch")[1]
STACKED = jax.vmap(lambda x: STATE)(BATCHES[0])
WRONG: list[Any] = [0.0, -2.0, np.inf, np.nan, "many", True, None, jnp.ones(3)]


def pooled(states: Any, values: Any, model: Any = NEW) -> Any:
    return pool_statistics(model, states, values)


ERRORS: list[tuple[Any, str]] = [
    (lambda: pooled([], []), r"^states=\[\] holds no states: "),
    (lambda: pooled((state for state in []), []), "^states=.* holds no .* generator is empty"),
    (lambda: pooled(STATE, [1]), r"(?s)^states=State\(.* holds no states: give a list"),
    (lambda: pooled([STATE, 9], [1, 2]), r"^states\[1\] is 9, no eqx.nn.State"),
    (lambda: pooled([STATE, None], [1, 2]), r"^states\[1\] is nothing \(None\), no"),
    (lambda: pooled([NEW], [1], STATE), "^The model given is an eqx.nn.State"),
    (lambda: pooled(PAIR, [1]), r"^values=\[1\], but the number of states is 2: give"),
    (lambda: pooled(PAIR, 9), "^values=9, but the number of states is 2"),
    (
        lambda: pooled([STATE, OTHER[1]], [1, 2]),
        r"^states\[1\]: BatchNorm: .*has no entry",
    ),
    (lambda: pooled([WIDER], [1]), r"^states\[0\]: BatchNorm: .*belongs to another layer"),
    (
        lambda: pooled([STATE, STACKED], [1, 2]),
        r"^states\[1\]: BatchNorm: .* more axis",
    ),
    (
        lambda: pooled(UNLOADED[1], SIZES, UNLOADED[0]),
        "^BatchNorm: Cumulative cannot",
    ),
    (
        lambda: pooled(UNBIASED[1], SHARES, UNBIASED[0]),
        r"\[0.5, 0.2, 0.3\]: .* above 1",
    ),
    (lambda: pooled([OTHER[1]], [1], OTHER[0]), "nothing to pool: .* no eqx_norm.BatchNorm"),
    (lambda: eqx.filter_jit(pooled)([STATE], [1]), "^This function reads the values of arrays"),
    *((lambda n=n: pooled(PAIR, [1, n]), r"^values\[1\] is .* above 0") for n in WRONG),
]


@pytest.mark.parametrize(("call", "error"), ERRORS, ids=range(len(ERRORS)))
def test_unsupported_calls_are_errors(unchecked, call, error):
    with pytest.raises(ValueError, match=error):
        call()
