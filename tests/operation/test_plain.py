"""Tests that what reads or transforms programs meets JAX's own primitives, where it is said so.

In inference always.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

from eqx_norm import LayerNorm
from eqx_norm._normalise import jaxprs
from tests.compiling import jit
from tests.helpers import APPROACHES, copy, make, normal, over_batch

SHAPE = (6, 4, 3, 5)
ACTIVATIONS = {
    "none": None,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "prelu": eqx.nn.PReLU(0.25),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
}
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


def batch_norm(activation=None, *, inference=False, masked=False, **arguments):
    """Returns x, and a function of it: a layer that has seen it once."""
    arguments = {"approach": "batch", **arguments}
    layer, state = make(SHAPE[1], "batch", activation=activation, **arguments)
    x = 3 + 2 * normal(0, SHAPE)
    mask = jnp.arange(SHAPE[-1]) < 4 if masked else None
    _, state = over_batch(layer)(x, state)
    layer = eqx.nn.inference_mode(layer, inference)

    def call(x):
        def one(x):
            return layer(x, copy(state), mask=mask)

        return jax.vmap(one, axis_name="batch", out_axes=(0, None))(x)[0]

    return call, x


def layer_norm(activation=None, **arguments):
    layer = LayerNorm(SHAPE[1:], activation=activation, **arguments)
    return jax.vmap(layer), 3 + 2 * normal(0, SHAPE)


PLAIN = {
    **{
        f"inference, {approach}": lambda act, approach=approach: batch_norm(
            act, approach=approach, inference=True
        )
        for approach in APPROACHES
    },
    "inference, mask": lambda act: batch_norm(act, inference=True, masked=True),
}
each_plain = pytest.mark.parametrize("made", PLAIN.values(), ids=PLAIN)


def own_primitives(call, x):
    closed = jax.make_jaxpr(call)(x)
    names = {equation.primitive.name for equation in jaxprs.equations(closed.jaxpr)}
    return {name for name in names if name.startswith("eqx_norm")}


@each_activation
@each_plain
def test_it_is_made_of_jax_s_own_primitives(made, activation):
    assert not own_primitives(*made(activation))


@pytest.mark.parametrize("made", [batch_norm, layer_norm])
def test_which_it_is_not_otherwise(made):
    assert own_primitives(*made())


# Each transformation knows no primitives but JAX's; `jet` takes no `custom_jvp` such as ReLU.
@pytest.mark.parametrize("activation", [None, jnp.tanh], ids=["none", "tanh"])
@pytest.mark.parametrize("name", ["inference, batch"])
def test_taylor_series(name, activation):
    call, x = PLAIN[name](activation)
    dx = normal(1, SHAPE)

    @jit
    def by_jet(x, dx):
        y, (first, second) = jet(call, (x,), ((dx, jnp.zeros_like(dx)),))
        return y, first, second

    @jit
    def by_jvp(x, dx):
        def first(x):
            return jax.jvp(call, (x,), (dx,))

        (y, dy), (_, second) = jax.jvp(first, (x,), (dx,))
        return y, dy, second

    for found, right in zip(by_jet(x, dx), by_jvp(x, dx), strict=True):
        np.testing.assert_allclose(found, right, atol=5e-6)
