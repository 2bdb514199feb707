"""Running statistics change once per training call, by what the formula says."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from eqx_norm.strategies import Running, VarianceClip

from .compiling import filter_jit
from .helpers import (
    APPROACHES,
    bits,
    call,
    call_and_grad,
    copy,
    f32,
    make,
    normal,
    over_batch,
    quick_call,
    remembered,
)

X = normal(0, (8, 3, 4), 1, 2)
each_approach = pytest.mark.parametrize("approach", APPROACHES)


def equal(a, b):
    return [bits(leaf) for leaf in jax.tree.leaves(a)] == [
        bits(leaf) for leaf in jax.tree.leaves(b)
    ]


@each_approach
def test_inference_never_changes_it(approach):
    layer, state = make(3, "batch", approach=approach)
    _, state = quick_call(layer, state, X)
    for inference in (
        eqx.nn.inference_mode(layer),
        functools.partial(layer, inference=True),
    ):
        before = copy(state)
        _, after = quick_call(inference, state, 2 * X)
        assert equal(before, after)


def test_training_can_be_asked_for_in_one_call():
    layer, state = make(3, "batch", approach="batch", inference=True)
    _, after = call(functools.partial(layer, inference=False), copy(state), X)
    assert not equal(state, after)


@each_approach
def test_with_and_without_a_gradient_it_is_the_same(approach):
    """MXNet #21111: to the bit. (From the second batch on, a compiled program rounds once where
    one that is run op by op rounds twice.)"""
    layer, state = make(3, "batch", approach=approach)
    _, without = call(layer, copy(state), X)
    _, with_gradient, _ = call_and_grad(layer, copy(state), X, X)
    _, without_jit = over_batch(layer)(X, copy(state))
    assert equal(without, with_gradient)
    assert equal(without, without_jit)


@each_approach
def test_no_gradient_flows_into_or_out_of_memory(approach):
    layer, state = make(3, "batch", approach=approach)
    _, state = call(layer, state, X)

    def remembered_after(x):
        _, new_state = over_batch(layer)(x, copy(state))
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(new_state))

    def output(memory, inference):
        mode = functools.partial(layer, inference=inference)
        y, _ = over_batch(mode)(X, copy(state).set(layer.memory_index, memory))
        return jnp.sum(y**2)

    @filter_jit
    def gradients(x, memory):
        of_memory = [eqx.filter_grad(output)(memory, inference) for inference in (False, True)]
        return jax.grad(remembered_after)(x), *of_memory

    found = gradients(X, state.get(layer.memory_index))
    assert len(found) == 3
    for gradient in jax.tree.leaves(found):
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))


@each_approach
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_batch_that_is_not_finite_is_not_remembered_but_counted(approach, bad):
    layer, state = make(3, "batch", approach=approach)
    _, state = call(layer, state, X)
    before = copy(state)
    _, after = call(layer, state, X.at[3, 1, 2].set(bad))
    assert equal(before.get(layer.memory_index), after.get(layer.memory_index))
    assert after.get(layer.rejected_index) == 1
    _, after = call(layer, after, 2 * X)
    assert after.get(layer.rejected_index) == 1
    assert not equal(before.get(layer.memory_index), after.get(layer.memory_index))


@each_approach
@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1), (1, 3, 1, 1)], ids=str)
def test_one_value_per_channel(approach, shape):
    """MXNet #21111: a single value has no variance; that is no reason for NaN."""
    layer, state = make(3, "batch", approach=approach)
    layer = eqx.tree_at(lambda m: m.bias, layer, jnp.arange(3.0))
    x = normal(0, shape, 100, 10)
    y, state, (_, dx) = call_and_grad(layer, state, x, jnp.ones(shape))
    assert bits(y) == bits(jnp.arange(3.0))
    np.testing.assert_array_equal(dx, np.zeros(shape))
    mean, variance = remembered(layer, state)
    np.testing.assert_allclose(mean, x.reshape(3), rtol=1e-6)
    np.testing.assert_array_equal(variance, np.zeros(3))
    assert np.isfinite(quick_call(eqx.nn.inference_mode(layer), state, x)[0]).all()


@pytest.mark.parametrize("n", [7, 9, 121])
@pytest.mark.parametrize("constant", [1e-3, 0.1, 1 / 3, 300.0, 65504.0])
def test_a_constant_channel_gives_exactly_the_bias(n, constant):
    """Caffe #3963, alive in XLA: the mean of a constant has to be that constant."""
    layer, state = make(2, "batch", approach="batch")
    layer = eqx.tree_at(lambda m: m.bias, layer, jnp.array([0.5, -2.0]))
    y, state = call(layer, state, jnp.full((n, 2), constant))
    assert bits(y) == bits(jnp.tile(layer.bias, (n, 1)))
    np.testing.assert_array_equal(remembered(layer, state)[1], np.zeros(2))


@each_approach
@pytest.mark.parametrize("unbiased", [False, True])
def test_one_update_takes_in_the_variance_that_unbiased_says(approach, unbiased):
    """MXNet #21111: biased or unbiased has to be a visible choice."""
    layer, state = make(3, "batch", approach=approach, momentum=1e-6, unbiased=unbiased)
    y, state = quick_call(layer, state, X)
    values = np.asarray(X, np.float64).swapaxes(0, 1).reshape(3, -1)
    mean, variance = remembered(layer, state)
    np.testing.assert_allclose(mean, values.mean(1), rtol=1e-5)
    np.testing.assert_allclose(variance, values.var(1, ddof=int(unbiased)), rtol=1e-5)
    if approach in ("batch", "variance_clip"):
        np.testing.assert_allclose(y.std((0, 2)), np.ones(3), rtol=1e-5)


def test_loaded_statistics_are_used_as_they_are():
    layer, state = make(3, "batch", approach="batch", inference=True)
    state = state.set(layer.memory_index, Running.loaded(f32([1, 2, 3]), f32([4, 9, 16])))
    y, _ = call(layer, state, X)
    right = (X - f32([1, 2, 3])[:, None]) / f32([2, 3, 4])[:, None]
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)


@each_approach
def test_serialisation(approach, tmp_path):
    model, state = make(3, "batch", approach=approach)
    _, state = call(model, state, X)
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", (model, state))
    like = make(3, "batch", approach=approach)
    loaded_model, loaded_state = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", like)
    assert equal((model, state), (loaded_model, loaded_state))
    chex.assert_trees_all_equal(call(model, state, X), call(loaded_model, loaded_state, X))


def test_sequential():
    """All approaches in one model."""

    def build(key):
        keys = jax.random.split(key)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(1, 3, 3, key=keys[0]),
                *(BatchNorm(3, "batch", approach=approach) for approach in APPROACHES),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Conv2d(3, 2, 3, key=keys[1]),
                BatchNorm(2, "batch", approach="ema"),
            ]
        )

    model, state = filter_jit(eqx.nn.make_with_state(build))(jax.random.key(0))
    before = copy(state)
    y, state = quick_call(model, state, normal(0, (4, 1, 7, 7)))
    assert y.shape == (4, 2, 3, 3)
    for layer in model.layers:
        if isinstance(layer, BatchNorm):
            index = layer.memory_index
            assert not equal(before.get(index), state.get(index))


def test_batches_are_counted():
    layer, state = make(3, "batch", approach="batch")
    for x in (X, X.at[0].set(jnp.nan), X, X):
        _, state = call(layer, state, x)
    assert state.get(layer.accepted_index) == 3
    assert state.get(layer.rejected_index) == 1


def test_counts_stay_at_the_largest_integer():
    layer, state = make(3, "batch", approach=VarianceClip(start=5))
    largest = jnp.int32(2**31 - 1)
    for index, x in ((layer.accepted_index, X), (layer.rejected_index, X * jnp.nan)):
        state = state.set(index, largest - 1)
        for _ in range(3):
            _, state = call(layer, state, x)
        assert state.get(index) == largest


def test_steps_are_one_program():
    traces = 0

    @eqx.filter_jit
    def step(layer, state, x):
        nonlocal traces
        traces += 1
        return over_batch(layer)(x, state)

    for approach in APPROACHES:
        layer, state = make(3, "batch", approach=approach)
        traces = 0
        for _ in range(4):
            _, state = step(layer, state, X)
        assert traces == 1


@pytest.mark.parametrize("made_with", [False, True], ids=["made in 32 bits", "made in 64 bits"])
def test_a_state_of_the_other_x64_setting(made_with):
    """It was an error of `update`'s, which a user has not written."""
    with jax.enable_x64(made_with):
        layer, state = make(3, "batch", approach="ema")
    with jax.enable_x64(not made_with):
        held, makes = ("float64", "float32")[:: 1 if made_with else -1]
        for mode in (layer, eqx.nn.inference_mode(layer)):
            with pytest.raises(ValueError, match="made under the other setting") as error:
                call(mode, copy(state), X)
            said = str(error.value)
            assert f"holds {held}" in said
            assert f"remembers {makes}" in said
            assert f"'jax_enable_x64', {made_with}" in said
        # The fix that is given.
        namespace = {"jax": jax, "state": state}
        exec(said.splitlines()[-1].strip(), namespace)
        _, after = call(layer, namespace["state"], X)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(after)} == {makes, "int32"}
