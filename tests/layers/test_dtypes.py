"""Tests dtypes: of outputs, gradients and memory, in half precision and under x64."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compiling import filter_jit
from tests.helpers import APPROACHES, copy, each_approach, make, normal, over_batch, remembered
from tests.layers.masking import forward

pytestmark = pytest.mark.x32  # has its own dtypes, in 64 bits and with strict promotion


def float_dtypes(tree):
    return {leaf.dtype for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)}


@filter_jit
def train_and_infer(layer, x, mask, state):
    """Returns training's and inference's output, the gradients of (layer, x), and the state."""

    def loss(layer_and_x):
        layer, x = layer_and_x
        y, after = forward(layer, x, mask, copy(state))
        return jnp.sum(y * y), (y, after)

    gradients, (y, after) = eqx.filter_grad(loss, has_aux=True)((layer, x))
    inferred, _ = forward(eqx.nn.inference_mode(layer), x, mask, copy(after))
    return y, inferred, gradients, after


HALVES = (jnp.bfloat16, jnp.float16)
# x, weights, whether in 64 bits, whether under a mask.
CASES = [
    *itertools.product(HALVES, (None, *HALVES, jnp.float32), [False], [False]),
    *itertools.product((jnp.float32, *HALVES), [None], [False], [True]),
    (jnp.float32, None, False, False),
    (jnp.float32, None, True, False),
    (jnp.float64, None, True, False),
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


@pytest.fixture(scope="module")
def trained():
    """Returns a layer of each approach after 1,500 steps on the same batches."""
    pairs = [
        make(4, "batch", approach=approach, momentum=0.99, dtype=jnp.bfloat16)
        for approach in APPROACHES
    ]
    layers, states = zip(*pairs, strict=True)

    @jax.jit
    def train(states):
        def step(states, key):
            noise = jax.random.normal(key, (256, 4, 4), jnp.float32)
            x = (100 + 3 * noise).astype(jnp.bfloat16)
            after = [over_batch(m)(x, s)[1] for m, s in zip(layers, states, strict=True)]
            return tuple(after), None

        return jax.lax.scan(step, states, jax.random.split(jax.random.key(0), 1500))[0]

    return dict(zip(APPROACHES, zip(layers, train(states), strict=True), strict=True))


@each_approach
def test_a_long_training_in_bfloat16(approach, trained):
    """An average of momentum 0.99 would stand still in bfloat16, which has 8 bits."""
    mean, variance = remembered(*trained[approach])
    # bfloat16 rounds numbers near 100 to multiples of 0.5, which adds 0.5**2 / 12 to 9: 0.2%.
    # An average over some 200 batches of 1,024 values is off by 0.3% at one sigma.
    np.testing.assert_allclose(mean, np.full(4, 100), rtol=0.02)
    np.testing.assert_allclose(variance, np.full(4, 9), rtol=0.02)
