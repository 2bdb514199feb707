"""Tests dtypes: of outputs, gradients and memory, in half precision and under x64."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compiling import filter_jit
from tests.helpers import APPROACHES, cast, copy, make, normal, remembered
from tests.layers.masking import forward
from tests.layers.norms import each_example_norm, made, over_examples

pytestmark = pytest.mark.x32  # has its own dtypes, in 64 bits and with strict promotion
F16, BF16, F32, F64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64


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


@pytest.mark.parametrize(
    ("approach", "dtype", "weights", "x64", "masked"),
    [
        *((approach, BF16, F16, False, False) for approach in APPROACHES),
        *((approach, F64, None, True, True) for approach in APPROACHES),
        ("batch", F16, BF16, False, False),
        ("batch", F16, F32, False, False),
        ("batch", F16, None, False, True),
        ("batch", F32, None, False, True),
        ("batch", F32, None, True, False),
    ],
)
def test_each_dtype_stays_what_it_is(approach, dtype, weights, x64, masked):
    """Outputs have the dtype of x, gradients that of the weights, which may be cast, the memory
    the default one; and no dtype is promoted without being asked for."""
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        layer, state = make(3, "batch", approach=approach)
        layer = layer if weights is None else cast(layer, weights)
        x = normal(0, (64, 3, 2), 100, 3).astype(dtype)
        mask = np.arange(64) < 40 if masked else None
        y, inferred, (gradients, dx), state = train_and_infer(layer, x, mask, state)
        default = jnp.result_type(float)
        mean, variance = remembered(layer, state)
    assert float_dtypes((y, inferred, dx)) == {jnp.dtype(dtype)}
    expected = default if weights is None else jnp.dtype(weights)
    assert float_dtypes(layer) == float_dtypes(gradients) == {expected}
    assert float_dtypes(state) == {default}
    for outputs in (y, inferred, gradients.weight):
        assert np.isfinite(np.asarray(outputs, np.float32)).all()
    values = np.asarray(x, np.float64)[mask if masked else ...]
    # One batch, remembered in float32: 1e-5 is some of its roundings, and no float16 has it.
    np.testing.assert_allclose(mean, values.mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(variance, values.var((0, 2)), rtol=1e-5)


@each_example_norm
@pytest.mark.parametrize(("dtype", "weights"), [(BF16, BF16), (F16, F32)])
def test_norms_of_one_example(name, dtype, weights):
    with jax.numpy_dtype_promotion("strict"):
        layer, _ = made(name, (6, 2), dtype=weights)
        x = normal(0, (3, 6, 2), 1).astype(dtype)
        y, pull_back = jax.vjp(over_examples, layer, x)
        gradients, dx = pull_back(y)
    assert float_dtypes((y, dx)) == {jnp.dtype(dtype)}
    assert float_dtypes(gradients) == {jnp.dtype(weights)}
