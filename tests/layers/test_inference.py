"""Tests that inference is made of JAX's own primitives, which exporters and `jet` know, and
that it is as exact as training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

import equinox as eqx
from eqx_norm._normalise import jaxprs
from tests import exact
from tests.compiling import jit
from tests.helpers import copy, make, normal, over_batch
from tests.layers.accuracy import BOUNDS, make_batch
from tests.layers.norms import with_parameters

SHAPE = (6, 4, 3, 5)
X = 3 + 2 * normal(0, SHAPE)
ACTIVATIONS = {
    "none": None,
    "relu": jax.nn.relu,
    "prelu": eqx.nn.PReLU(0.25),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
}


def inference(activation, mask=None):
    """Returns a layer that has seen X once, mapped over a batch."""
    layer, state = make(SHAPE[1], "batch", activation=activation, approach="batch")
    _, state = over_batch(layer)(X, state)
    layer = eqx.nn.inference_mode(layer)
    return jax.vmap(lambda x: layer(x, copy(state), mask=mask)[0])


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("mask", [None, jnp.arange(SHAPE[-1]) < 4], ids=["all", "masked"])
def test_it_is_made_of_jax_s_own_primitives(activation, mask):
    closed = jax.make_jaxpr(inference(activation, mask))(X)
    names = {equation.primitive.name for equation in jaxprs.equations(closed.jaxpr)}
    assert not any(name.startswith("eqx_norm") for name in names)


def test_taylor_series():
    """`jet` takes no `custom_jvp` such as ReLU."""
    call, dx = inference(jnp.tanh), normal(1, SHAPE)

    @jit
    def by_jet(x, dx):
        y, (first, second) = jet(call, (x,), ((dx, jnp.zeros_like(dx)),))
        return y, first, second

    @jit
    def by_jvp(x, dx):
        first = lambda x: jax.jvp(call, (x,), (dx,))  # noqa: E731
        (y, dy), (_, second) = jax.jvp(first, (x,), (dx,))
        return y, dy, second

    for actual, desired in zip(by_jet(X, dx), by_jvp(X, dx), strict=True):
        np.testing.assert_allclose(actual, desired, atol=5e-6)


# A running mean in float32 alone is off by up to a third of the standard deviation at 1e7. With
# x64 it is a float64, of which x takes the nearest float32 and the rest.
@pytest.mark.parametrize(
    ("dtype", "ratio"),
    [("float32", 1), ("float32", 1e7), ("bfloat16", 100)],
)
@pytest.mark.parametrize("x64", [False, True], ids=["float32 memory", "float64 memory"])
@pytest.mark.parametrize("shape", [(64, 8), (16, 8, 7, 7)], ids=["vectors", "images"])
def test_y_far_from_zero(dtype, ratio, x64, shape):
    """After one batch, inference returns what training did, to the bounds of training."""
    random = np.random.default_rng(0)
    batch = make_batch(random, (ratio + random.standard_normal(shape)).astype(jnp.dtype(dtype)))
    with jax.enable_x64(x64):
        layer, state = make(8, "batch", approach="batch")
        layer = with_parameters(layer, *map(jnp.asarray, (batch.weight, batch.bias)))
        _, state = over_batch(layer)(batch.x, state)
        y, _ = jax.jit(over_batch(eqx.nn.inference_mode(layer)))(batch.x, state)
    assert y.dtype == dtype
    answer = exact.Answer(np.asarray(y, np.longdouble), None, None, None, None)
    assert exact.errors(batch, exact.batch_norm(batch), answer).y <= BOUNDS["y"]
