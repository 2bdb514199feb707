"""Tests that what is compiled depends on nothing that may change behind its back."""

import functools
import gc
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm
from eqx_norm.strategies import Batch
from tests.helpers import copy, make, normal, over_batch

SHAPE = (4, 3)


def batch_norm(activation, approach: Any = "batch"):
    layer, state = make(3, "batch", approach=approach, activation=activation)
    return lambda x: over_batch(layer)(x, copy(state))[0]


def layer_norm(activation):
    return jax.vmap(LayerNorm(3, activation=activation))


each_layer = pytest.mark.parametrize("made", [batch_norm, layer_norm])


class Scaled:
    """Multiplies by a number that the user may change."""

    def __init__(self):
        self.factor = np.array(1.0, np.float32)

    def __call__(self, u):
        return u * self.factor


def by_attribute():
    scaled = Scaled()
    return scaled, lambda factor: setattr(scaled, "factor", factor)


def by_array():
    scaled = Scaled()
    return scaled, lambda factor: np.copyto(scaled.factor, factor)


def by_partial():
    factor = np.ones((), np.float32)
    return functools.partial(jnp.multiply, factor), lambda value: np.copyto(factor, value)


def by_global():
    names = {"factor": 1.0}
    return lambda u: u * names["factor"], lambda factor: names.update(factor=factor)


@each_layer
@pytest.mark.parametrize("made_activation", [by_attribute, by_array, by_partial, by_global])
def test_an_activation_that_changes(made, made_activation):
    activation, change = made_activation()
    layer, x = made(activation), normal(0, SHAPE)
    before, gradient = layer(x), jax.grad(lambda x: layer(x)[0, 0])
    slope = gradient(x)
    change(5.0)
    np.testing.assert_allclose(layer(x), 5 * before, rtol=1e-6)
    np.testing.assert_allclose(gradient(x), 5 * slope, rtol=1e-5)


@each_layer
def test_an_activation_that_holds_a_tracer(made):
    names = {}
    layer, x = made(lambda u: u * names["factor"]), normal(0, SHAPE)

    def loss(factor):
        names["factor"] = factor
        return layer(x)[0, 0]

    for factor in (2.0, 3.0):
        slope = jax.grad(loss)(factor)
        np.testing.assert_allclose(slope, loss(factor) / factor, rtol=1e-6)


class Told(eqx.Module):
    """Is of what the number that it holds is written as."""

    number: float

    def __call__(self, u):
        signs = {"True": 1, "1": 2, "1.0": 3, "0.0": 4, "-0.0": 5}
        return u * 0 + signs[str(self.number)]


@each_layer
def test_modules_whose_leaves_are_equal_but_not_the_same(made):
    for right, number in enumerate([True, 1, 1.0, 0.0, -0.0], 1):
        assert np.all(made(Told(number))(jnp.ones(SHAPE)) == right)
    for number in (0.0, -0.0):
        y = made(functools.partial(jnp.where, True, number))(jnp.ones(SHAPE))
        assert np.all(np.signbit(y) == np.signbit(number))


class Weighted(Batch):
    """Holds an array that it says is static."""

    weights: np.ndarray = eqx.field(static=True, default_factory=lambda: np.ones(3))


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_a_strategy_with_a_static_array():
    x = normal(0, SHAPE)
    for _ in range(2):  # it is compared with the one before
        y = batch_norm(None, Weighted())(x)
        np.testing.assert_allclose(y, batch_norm(None)(x), rtol=1e-6, atol=1e-6)


@each_layer
def test_activations_of_eager_calls_are_not_kept(made):
    class Squared:
        def __call__(self, u):
            return u * u

    def called():
        activation = Squared()
        jax.grad(lambda x: made(activation)(x).sum())(normal(0, SHAPE))
        return weakref.ref(activation)

    activation = called()
    gc.collect()
    assert activation() is None


@pytest.mark.parametrize("activation", [jax.nn.relu, functools.partial(jax.nn.elu, alpha=0.5)])
def test_what_cannot_change_is_traced_once(activation):
    """Tests that it matters: what is not traced again is one function of a program."""
    layers = [BatchNorm(3, "batch", approach="batch", activation=activation) for _ in range(3)]
    states = [eqx.nn.State(layer) for layer in layers]

    def model(x):
        for layer, state in zip(layers, states, strict=True):
            x, _ = over_batch(layer)(x, copy(state))
        return x

    text = jax.jit(model).lower(normal(0, SHAPE)).as_text()
    assert len([line for line in text.splitlines() if "call @call" in line]) == 3
    assert text.count("func.func private @call(") == 1
