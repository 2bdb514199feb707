"""Tests that statistics keep their number of values, and that every reader gets the unbiased
variance."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import models
from eqx_norm.models import from_torch, reconfigure, swap
from eqx_norm.strategies import Accumulated, Average, Cumulative, VarianceClip
from tests.helpers import (
    Loading,
    copy,
    floats,
    make,
    member,
    normal,
    over_batch,
    remembered,
    same,
)
from tests.helpers import quick_call as call
from tests.models.nested import KEY, THEIRS, C, made, norm

UNOPTIMISED = True  # compares values: tests/compiling.py

MEAN, VARIANCE, N = np.array([1.0, -2, 3]), np.array([4.0, 1, 9]), 16_000
COUNTING = [Cumulative(), VarianceClip(Loading(), start=9), Accumulated(Cumulative(), 1)]


def loaded(approach: Any, unbiased: bool = False, **settings: Any) -> tuple[Any, Any]:
    layer, state = make(C, "batch", 1e-5, False, approach=approach, unbiased=unbiased)
    arrays = {"running_mean": MEAN, "running_var": VARIANCE}
    return from_torch(layer, state, arrays, **settings)[:2]


def of_equinox() -> tuple[Any, Any]:
    layer, state = made(norm, THEIRS, "ema")
    state = state.set(layer.ema_first_time_index, jnp.array(False))
    return layer, state.set(layer.ema_state_index, (floats(MEAN), floats(VARIANCE)))


def of_two_clients(approach: Any) -> tuple[Any, Any]:
    layer, state = loaded(approach, values=N // 2)
    half, held = layer.running(state), state.get(layer.memory_index)
    whole = held._replace(statistics=approach.load(half.merge(half)))
    return layer, state.set(layer.memory_index, whole)


LOADED: dict[str, Any] = {
    "Gymnasium": lambda new: loaded(new, values=np.float64(N)),
    "unbiased": lambda new: loaded(new, unbiased=True, values=N),
    "average": lambda new: reconfigure(*loaded("batch"), approach=new, values=N),
    "jit": lambda new: eqx.filter_jit(reconfigure)(*loaded("batch"), approach=new, values=N),
    "Equinox": lambda new: swap(*of_equinox(), new, values=N),
    "count": lambda new: reconfigure(*loaded(Loading(), values=N), approach=new),
    "clients": of_two_clients,
}


@pytest.mark.parametrize(
    ("case", "approach"), [(case, COUNTING[i % 3]) for i, case in enumerate(LOADED)]
)
def test_loaded_statistics_weigh_as_many_values_as_they_stand_for(case, approach):
    """rsl_rl#30, habitat-lab#570, sinergym#491, stable-baselines3#1256: 16 new values weighed
    16/17."""
    layer, state = LOADED[case](approach)
    np.testing.assert_allclose(remembered(layer, state), (MEAN, VARIANCE), rtol=4e-7)
    x = np.asarray(normal(0, (16, C), 5, 2), float)
    _, state = call(layer, state, floats(x))
    mean, count = np.mean(x, 0), N + 16
    m2 = (
        VARIANCE * (N - layer.unbiased)
        + 16 * np.var(x, 0)
        + (mean - MEAN) ** 2 * 16 * N / count
    )
    expected = (N * MEAN + 16 * mean) / count, m2 / (count - layer.unbiased)
    assert layer.running(state).count == count
    np.testing.assert_allclose(remembered(layer, state), expected, rtol=1e-6)


def test_average_continues_with_the_number_of_batches_given():
    layer, state = swap(*of_equinox(), Average(), batches=9)
    x = np.asarray(normal(0, (16, C), 5, 2), float)
    _, state = call(layer, state, floats(x))
    expected = 0.9 * MEAN + 0.1 * x.mean(0), 0.9 * VARIANCE + 0.1 * x.var(0)
    np.testing.assert_allclose(remembered(layer, state), expected, rtol=1e-6)
    assert state.get(layer.memory_index).accepted == 10


@pytest.mark.parametrize("approach", COUNTING[:2], ids=str)
def test_every_reader_gets_the_unbiased_variance(approach):
    """tt-metal#55438, pytorch#106366: the variance of these values was 5.25, not 7."""
    x = np.add.outer([0.0, 3, 5, 6], [0, 10, 100])
    layer, state = make(C, "batch", approach=approach, unbiased=True)
    _, state = call(layer, state, floats(x))
    infer, linear = eqx.nn.inference_mode(layer), eqx.nn.Linear(C, C, key=KEY)
    theirs, their_state = models.unswap(layer, state, "batch")
    of_flag = jax.jit(lambda x, s, flag: over_batch(lambda *a: layer(*a, inference=flag))(x, s))
    variance = np.var(x, 0, ddof=1)
    scale = 1 / np.sqrt(variance + 1e-5)
    (folded, _), _ = models.fold_pairs([linear, infer], state, {"[0]": "[1]"})
    for got, expected in (
        (remembered(*reconfigure(layer, state, approach="batch"))[1], variance),
        (remembered(layer, models.recalibrate(layer, state, [x[:2], x[2:]]))[1], variance),
        (models.to_torch(layer, state)["running_var"], variance),
        (their_state.get(theirs.batch_state_index)[1], variance),
        (folded.weight, np.asarray(linear.weight) * scale[:, None]),
        (of_flag(floats(x), copy(state), jnp.array(True))[0], (x - x.mean(0)) * scale),
        (call(infer, copy(state), floats(x))[0], (x - x.mean(0)) * scale),
        (remembered(layer, state)[1], variance),
    ):
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("approach", [Cumulative(), Loading()], ids=["own", "user"])
def test_each_member_of_an_ensemble_has_its_own_number_of_values(approach):
    """Has as many members as channels, and compares with the members one by one."""
    members = [loaded("batch") for _ in range(C)]
    stack = partial(jax.tree.map, lambda *a: jnp.stack(a) if eqx.is_array(a[0]) else a[0])
    values = np.arange(1.0, C + 1)
    model, state = reconfigure(*stack(*members), approach=approach, values=values)
    for i, member_of in enumerate(members):
        alone, alone_state = reconfigure(*member_of, approach=approach, values=values[i])
        found, found_state = member((model, state), i)
        assert found.running(found_state).count == alone.running(alone_state).count
        assert same(found_state, alone_state)
    with pytest.raises(ValueError, match=r"values has shape \(2,\), but .*\(3, 3\)"):
        reconfigure(*stack(*members), approach=approach, values=values[:2])
    for wrong in (0, -values):
        with pytest.raises(ValueError, match="values=.*: give the number of values"):
            reconfigure(*stack(*members), approach=approach, values=wrong)
    with pytest.raises(ValueError, match=r"counts of shape \(3,\).* one count for all"):
        reconfigure(*members[0], approach=Cumulative(), values=values)
