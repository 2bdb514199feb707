"""Tests dtypes: of outputs, gradients and memory, in half precision and under x64."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compiling import filter_jit
from tests.helpers import (
    APPROACHES,
    copy,
    each_approach,
    make,
    normal,
    over_batch,
    quick_call_and_grad,
    remembered,
)
from tests.helpers import quick_call as call

HALVES = [jnp.bfloat16, jnp.float16]
each_half = pytest.mark.parametrize("half", HALVES)
each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, *HALVES])


@each_approach
@each_half
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16, jnp.float32])
def test_statistics_are_not_in_half_precision_and_the_output_is_as_the_input(
    dtype, half, approach
):
    layer, state = make(3, "batch", approach=approach, dtype=dtype)
    x = normal(0, (64, 3, 2), 100, 3).astype(half)
    y, state, (gradients, dx) = quick_call_and_grad(layer, state, x, jnp.ones_like(x))
    assert (y.dtype, dx.dtype) == (half, half)
    (weight,) = {leaf.dtype for leaf in jax.tree.leaves((layer.weight, gradients.weight))}
    assert weight == (jnp.result_type(float) if dtype is None else jnp.dtype(dtype))
    assert float_dtypes(state) == {jnp.result_type(float)}
    mean, variance = remembered(layer, state)
    values = np.asarray(x, np.float64)
    # One batch, remembered in float32: 1e-5 is some of its roundings, and no float16 has it.
    np.testing.assert_allclose(mean, values.mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(variance, values.var((0, 2)), rtol=1e-5)
    y, _ = call(eqx.nn.inference_mode(layer), state, x)
    assert y.dtype == half


def float_dtypes(tree):
    leaves = jax.tree.leaves(tree)
    return {leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)}


@each_approach
@each_dtype
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_strict_promotion(masked, dtype, approach):
    """No dtype is promoted that nobody has asked for."""
    layer, state = make(3, "batch", approach=approach)
    x = normal(0, (8, 3, 2), 2, 3).astype(dtype)
    mask = jnp.arange(8) < 5 if masked else None

    def loss(model_and_x, state):
        layer, x = model_and_x

        def one(x, mask):
            return layer(x, state, mask=mask)

        y, state = jax.vmap(one, axis_name="batch", out_axes=(0, None))(x, mask)
        return jnp.sum(y * y), (y, state)

    with jax.numpy_dtype_promotion("strict"):
        gradient = filter_jit(eqx.filter_grad(loss, has_aux=True))
        (gradients, dx), (y, after) = gradient((layer, x), copy(state))
        assert np.isfinite(gradients.weight).all()
        _, (inferred, _) = filter_jit(loss)((eqx.nn.inference_mode(layer), x), after)
    assert {y.dtype, dx.dtype, inferred.dtype} == {jnp.dtype(dtype)}
    for values in (y, inferred):
        assert np.isfinite(np.asarray(values, np.float32)).all()


@each_approach
def test_x64_layers_remember_in_float64(approach):
    with jax.enable_x64(True):
        layer, state = make(3, "batch", approach=approach)
        for dtype in (jnp.float32, jnp.float64):
            x = normal(0, (6, 3, 2), 1, 2).astype(dtype)
            y, state = call(layer, state, x)
            assert y.dtype == x.dtype
            assert float_dtypes(state) == {jnp.dtype(jnp.float64)}
            y, _ = call(eqx.nn.inference_mode(layer), copy(state), x)
            assert y.dtype == x.dtype


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


@pytest.mark.x32
@each_approach
def test_a_long_training_in_bfloat16(approach, trained):
    """1,500 steps: in bfloat16, of 8 bits, an average of momentum 0.99 would stand still."""
    mean, variance = remembered(*trained[approach])
    # bfloat16 rounds numbers near 100 to multiples of 0.5, which adds 0.5**2 / 12 to 9: 0.2%.
    # An average over some 200 batches of 1,024 values is off by 0.3% at one sigma.
    np.testing.assert_allclose(mean, np.full(4, 100), rtol=0.02)
    np.testing.assert_allclose(variance, np.full(4, 9), rtol=0.02)
