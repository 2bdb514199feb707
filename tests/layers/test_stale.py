"""Tests that equal layers share compiled code, and that this code never uses old values."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm
from eqx_norm.strategies import Batch, Moments
from tests.compiling import filter_jit
from tests.helpers import copy, each_approach, make, normal, over_batch, same

SHAPE = (4, 3)
X = normal(0, SHAPE)


def batch_norm(activation, approach: Any = "batch"):
    layer, state = make(3, "batch", approach=approach, activation=activation)
    return lambda x: over_batch(layer)(x, copy(state))[0]


def layer_norm(activation):
    return jax.vmap(LayerNorm(3, activation=activation))


each_layer = pytest.mark.parametrize("layer", [batch_norm, layer_norm])


class Scaled:
    factor = 1.0

    def __call__(self, u):
        return u * self.factor


def by_attribute():
    scaled = Scaled()
    return scaled, lambda factor: setattr(scaled, "factor", factor)


def by_array():
    factor = np.ones((), np.float32)
    return functools.partial(jnp.multiply, factor), lambda value: np.copyto(factor, value)


def by_global():
    names = {"factor": 1.0}
    return lambda u: u * names["factor"], lambda factor: names.update(factor=factor)


def by_wrapped():
    activation, change = by_global()
    return jax.vmap(eqx.nn.Lambda(activation)), change  # a module of Equinox


@each_layer
@pytest.mark.parametrize("activation", [by_attribute, by_array, by_global, by_wrapped])
def test_changed_activation_is_traced_again(layer, activation):
    activation, change = activation()
    call = layer(activation)
    gradient = jax.grad(lambda x: call(x)[0, 0])
    y, slope = call(X), gradient(X)
    change(5.0)
    np.testing.assert_allclose(call(X), 5 * y, rtol=1e-6)
    np.testing.assert_allclose(gradient(X), 5 * slope, rtol=1e-5)


@each_layer
def test_activation_may_hold_a_tracer(layer):
    names = {}
    call = layer(lambda u: u * names["factor"])

    def loss(factor):
        names["factor"] = factor
        return call(X)[0, 0]

    for factor in (2.0, 3.0):
        slope = jax.grad(loss)(factor)
        np.testing.assert_allclose(slope, loss(factor) / factor, rtol=1e-6)


@pytest.mark.parametrize("activation", [jax.nn.relu, functools.partial(jax.nn.elu, alpha=0.5)])
def test_equal_layers_lower_to_one_function(activation):
    layers = [BatchNorm(3, "batch", approach="batch", activation=activation) for _ in range(3)]
    states = [eqx.nn.State(layer) for layer in layers]

    def model(x):
        for layer, state in zip(layers, states, strict=True):
            x, _ = over_batch(layer)(x, copy(state))
        return x

    text = jax.jit(model).lower(X).as_text()
    assert len([line for line in text.splitlines() if "call @call" in line]) == 3
    assert text.count("func.func private @call(") == 1


class Wider(Batch):
    def update(self, batch, memory):
        return Moments.of(batch.mean, 4 * batch.variance), memory


@pytest.mark.parametrize(
    "options",
    [
        {"eps": 0.5},
        {"activation": jax.nn.relu},
        {"activation": functools.partial(jax.nn.elu, alpha=0.5)},
        {"unbiased": True},
        {"approach": Wider(0.99)},
    ],
)
def test_layers_with_different_settings_share_no_program(options):
    def outputs(**options):
        layer, state = make(3, "batch", **{"approach": Batch(0.99), **options})
        return over_batch(layer)(X, state)

    plain = outputs()
    assert same(outputs(approach="batch"), plain)
    assert not same(outputs(**options), plain)


@pytest.mark.x32
@each_approach
def test_steps_and_equal_layers_are_one_program(approach):
    """Tests that static fields are hashable and compare by value: a new layer is not traced."""

    @filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def step(layer, state, x):
        return over_batch(layer)(x, state)

    for _ in range(2):
        layer, state = make(3, ["batch"], approach=approach)
        for _ in range(3):
            _, state = step(layer, state, X)


@pytest.mark.x32
@each_layer
def test_derivatives_of_layers_without_jit(layer):
    """Fails if a primitive that is evaluated by a compiled program calls itself for ever."""
    derive = jax.grad(lambda x: jnp.sin(layer(jax.nn.relu)(x)).sum())
    with jax.disable_jit():
        outputs = derive(X)
    np.testing.assert_allclose(outputs, derive(X), rtol=1e-5, atol=1e-6)
