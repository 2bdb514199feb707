"""Tests dtypes: of outputs, gradients and memory, in half precision and under x64."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm
from tests.compiling import filter_jit
from tests.helpers import copy, each_approach, make, normal, remembered
from tests.layers.masking import forward

pytestmark = pytest.mark.x32  # has its own dtypes, in 64 bits and with strict promotion


def float_dtypes(tree):
    return {leaf.dtype for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)}


@filter_jit
def train_and_infer(layer, x, mask, state):
    """Returns training's and inference's output, the gradients of (layer, x), and the state."""

    def loss(layer_and_x):
        layer, x = layer_and_x
        y, after = forward(layer, copy(state), x, mask)
        return jnp.sum(y * y), (y, after)

    gradients, (y, after) = eqx.filter_grad(loss, has_aux=True)((layer, x))
    inferred, _ = forward(eqx.nn.inference_mode(layer), copy(after), x, mask)
    return y, inferred, gradients, after


HALVES = (jnp.bfloat16, jnp.float16)
# x, weights, whether in 64 bits, whether under a mask.
CASES = [
    *itertools.product(HALVES, (*HALVES, jnp.float32), [False], [False]),
    *itertools.product((jnp.float32, *HALVES), [None], [False], [False, True]),
    (jnp.float32, None, True, False),
    (jnp.float64, None, True, True),
]


@each_approach
@pytest.mark.parametrize(("dtype", "weights", "x64", "masked"), CASES)
def test_each_dtype_stays_what_it_is(approach, dtype, weights, x64, masked):
    """Outputs have the dtype of x, gradients that of the weights, the memory the default one;
    and no dtype is promoted without being asked for."""
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        layer, state = make(3, "batch", approach=approach, dtype=weights)
        x = normal(0, (64, 3, 2), 100, 3).astype(dtype)
        mask = np.arange(64) < 40 if masked else None
        y, inferred, (gradients, dx), state = train_and_infer(layer, x, mask, state)
        default = jnp.result_type(float)
        mean, variance = remembered(layer, state)
    assert float_dtypes((y, inferred, dx)) == {jnp.dtype(dtype)}
    right = default if weights is None else jnp.dtype(weights)
    assert float_dtypes(layer) == float_dtypes(gradients) == {right}
    assert float_dtypes(state) == {default}
    for values in (y, inferred, gradients.weight):
        assert np.isfinite(np.asarray(values, np.float32)).all()
    counted = np.asarray(x, np.float64)[mask if masked else ...]
    # One batch, remembered in float32: 1e-5 is some of its roundings, and no float16 has it.
    np.testing.assert_allclose(mean, counted.mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(variance, counted.var((0, 2)), rtol=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_layer_norm(dtype):
    with jax.numpy_dtype_promotion("strict"):
        layer, x = LayerNorm(6, dtype=dtype), normal(0, (6,), 1).astype(dtype)
        y, pull_back = jax.vjp(lambda layer, x: layer(x), layer, x)
        assert float_dtypes((y, pull_back(y))) == {jnp.dtype(dtype)}
