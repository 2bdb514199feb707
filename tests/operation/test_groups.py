"""Tests the operation with other moments than a layer has so far: of groups, or around 0."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._example import Options, normalised
from tests.helpers import normal

SHAPE = (4, 6, 5, 7)
# What `Values` are given, and the layer of Equinox that does the same.
LAYERS = {
    "2 groups": ({"groups": 2, "channels": 6}, eqx.nn.GroupNorm(2, 6)),
    "1 group": ({"groups": 1, "channels": 6}, eqx.nn.GroupNorm(1, 6)),
    "instance": ({"groups": 6, "channels": 6}, eqx.nn.GroupNorm(6, 6)),
    "rms": ({"centred": False}, eqx.nn.RMSNorm(SHAPE[1:])),
}
each = pytest.mark.parametrize(("options", "layer"), LAYERS.values(), ids=LAYERS)


def called(options, activation, layer, x):
    """Returns what our layer with the weights of this one would."""
    return normalised((layer.weight, layer.bias, activation), Options(1e-5, **options), x)


def loss(one, x):
    y = jax.vmap(one)(x)
    return jnp.sum(jnp.sin(y) * jnp.linspace(0, 1, y.size).reshape(y.shape)), y


@each
@pytest.mark.x32
@pytest.mark.parametrize("activation", [None, jax.nn.silu])
def test_as_equinox_s_layer(options, layer, activation):
    x = 3 + 2 * normal(0, SHAPE)
    moved = layer.weight * 2, layer.bias + 1
    layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, moved)

    def ours(layer, x):
        return loss(lambda x: called(options, activation, layer, x), x)

    def theirs(layer, x):
        return loss(lambda x: (activation or (lambda y: y))(layer(x)), x)

    def both(function):
        graded = eqx.filter_value_and_grad(lambda m: function(*m), has_aux=True)
        return eqx.filter_jit(graded)((layer, x))

    (_, y), gradients = both(ours)
    (_, right), right_gradients = both(theirs)
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=2e-5)
    for a, b in zip(*map(jax.tree.leaves, (gradients, right_gradients)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-5)

    def second(function):
        gradient = jax.grad(lambda x: function(layer, x)[0])
        return jax.jit(lambda: jax.jvp(gradient, (x,), (normal(1, SHAPE),))[1])()

    np.testing.assert_allclose(second(ours), second(theirs), rtol=1e-4, atol=1e-5)


@each
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_x_is_kept_and_vectors(options, layer, dtype):
    x = normal(0, SHAPE).astype(dtype)
    one = functools.partial(called, options, jax.nn.silu, layer)
    _, backward = jax.vjp(jax.vmap(one), x)
    kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.size >= x.size]
    assert [(k.shape, k.dtype) for k in kept] == [(SHAPE, dtype)]
