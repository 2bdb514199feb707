"""Tests that inference is made of JAX's own primitives, which exporters and `jet` know."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

from eqx_norm._normalise import jaxprs
from tests.compiling import jit
from tests.helpers import copy, each_approach, make, normal, over_batch

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
