"""Tests that inference is made of JAX's own primitives, which exporters and `jet` know, and
that it is as exact as training."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

from eqx_norm._normalise import jaxprs
from tests import exact
from tests.compiling import jit
from tests.helpers import copy, each_approach, make, normal, over_batch
from tests.layers.accuracy import BOUNDS, make_batch

SHAPE = (6, 4, 3, 5)
X = 3 + 2 * normal(0, SHAPE)
ACTIVATIONS = {
    "none": None,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "prelu": eqx.nn.PReLU(0.25),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
}


def inference(activation, approach="batch", mask=None):
    """Returns a layer that has seen X once, mapped over a batch."""
    layer, state = make(SHAPE[1], "batch", activation=activation, approach=approach)
    _, state = over_batch(layer)(X, state)
    layer = eqx.nn.inference_mode(layer)
    return jax.vmap(lambda x: layer(x, copy(state), mask=mask)[0])


@each_approach
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("mask", [None, jnp.arange(SHAPE[-1]) < 4], ids=["all", "masked"])
def test_it_is_made_of_jax_s_own_primitives(approach, activation, mask):
    closed = jax.make_jaxpr(inference(activation, approach, mask))(X)
    names = {equation.primitive.name for equation in jaxprs.equations(closed.jaxpr)}
    assert not any(name.startswith("eqx_norm") for name in names)


# `jet` takes no `custom_jvp` such as ReLU.
@pytest.mark.parametrize("activation", [None, jnp.tanh], ids=["none", "tanh"])
def test_taylor_series(activation):
    call, dx = inference(activation), normal(1, SHAPE)

    @jit
    def by_jet(x, dx):
        y, (first, second) = jet(call, (x,), ((dx, jnp.zeros_like(dx)),))
        return y, first, second

    @jit
    def by_jvp(x, dx):
        first = lambda x: jax.jvp(call, (x,), (dx,))  # noqa: E731
        (y, dy), (_, second) = jax.jvp(first, (x,), (dx,))
        return y, dy, second

    for found, right in zip(by_jet(X, dx), by_jvp(X, dx), strict=True):
        np.testing.assert_allclose(found, right, atol=5e-6)


# A running mean in float32 alone is off by up to a third of the standard deviation at 1e7. With
# x64 it is a float64, of which x takes the nearest float32 and the rest.
@pytest.mark.parametrize(
    ("dtype", "ratio"),
    [("float32", 1), ("float32", 1e3), ("float32", 1e7), ("bfloat16", 1), ("bfloat16", 100)],
)
@pytest.mark.parametrize("x64", [False, True], ids=["float32 memory", "float64 memory"])
@pytest.mark.parametrize("shape", [(64, 8), (16, 8, 7, 7)], ids=["vectors", "images"])
def test_y_far_from_zero(dtype, ratio, x64, shape):
    """After one batch, inference returns what training did, to the bounds of training."""
    random = np.random.default_rng(0)
    x = ratio + random.standard_normal(shape)
    batch = make_batch(random, x.astype(jnp.dtype(dtype)))
    with jax.enable_x64(x64):
        layer, state = make(8, "batch", approach="batch")
        layer = eqx.tree_at(lambda layer: layer.bias, layer, jnp.asarray(batch.bias))
        layer = eqx.tree_at(lambda layer: layer.weight, layer, jnp.asarray(batch.weight))
        _, state = over_batch(layer)(batch.x, state)
        y, _ = jax.jit(over_batch(eqx.nn.inference_mode(layer)))(batch.x, state)
    assert y.dtype == dtype
    shifted = batch.x.astype(np.longdouble) - ratio  # the same answer, with more digits
    right = exact.batch_norm(batch._replace(x=shifted))
    given = exact.Answer(np.asarray(y, np.longdouble), None, None, None, None)
    assert exact.errors(batch, right, given).y <= BOUNDS["y"]
