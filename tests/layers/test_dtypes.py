"""Tests dtypes: of outputs, gradients and memory, in half precision and under x64."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from tests.compiling import filter_jit
from tests.helpers import APPROACHES, cast, copy, make, normal, over_batch, remembered
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
    expected = default if weights is None else jnp.dtype(weights)
    assert float_dtypes(layer) == float_dtypes(gradients) == {expected}
    assert float_dtypes(state) == {default}
    for values in (y, inferred, gradients.weight):
        assert np.isfinite(np.asarray(values, np.float32)).all()
    counted = np.asarray(x, np.float64)[mask if masked else ...]
    # One batch, remembered in float32: 1e-5 is some of its roundings, and no float16 has it.
    np.testing.assert_allclose(mean, counted.mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(variance, counted.var((0, 2)), rtol=1e-5)


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


def network():
    def build(keys):
        layers = []
        for key in keys:
            conv = eqx.nn.Conv1d(3, 3, 3, padding=1, key=key)
            norm = BatchNorm(3, "batch", approach="batch", activation=jax.nn.relu)
            layers += [conv, norm]
        return eqx.nn.Sequential(layers)

    return eqx.nn.make_with_state(build)(jax.random.split(jax.random.key(0)))


@filter_jit
def step(model, state, x):
    """Returns the output, the model and the state after one step of gradient descent."""

    def loss(model):
        y, after = over_batch(model)(x, copy(state))
        return jnp.sum(jnp.square(y - 1)), (y, after)

    gradients, (y, after) = eqx.filter_grad(loss, has_aux=True)(model)
    updates = jax.tree.map(lambda g: -1e-3 * g, gradients)
    return y, eqx.apply_updates(model, updates), after


@pytest.mark.parametrize(
    ("convolutions", "norms"), [(BF16, BF16), (F16, F16), (BF16, F32), (F32, F16)]
)
def test_a_model_cast_leaf_by_leaf_trains(convolutions, norms):
    """As a whole, or all but its norms, or only these; not its state, which stays float32."""
    with jax.numpy_dtype_promotion("strict"):
        model, state = network()
        layers = zip(model.layers, (convolutions, norms) * 2, strict=True)
        model = eqx.nn.Sequential([cast(layer, dtype) for layer, dtype in layers])
        before, x = float_dtypes(model), normal(0, (16, 3, 4), 2, 3).astype(convolutions)
        means = []
        for _ in range(3):
            y, model, state = step(model, state, x)
            assert y.dtype == convolutions
            means.append(remembered(model.layers[3], state)[0])
    assert float_dtypes(model) == before == {jnp.dtype(convolutions), jnp.dtype(norms)}
    assert float_dtypes(state) == {jnp.dtype(F32)}
    assert np.isfinite(means).all()
    assert not np.array_equal(means[0], means[1])
    assert not np.array_equal(means[1], means[2])
