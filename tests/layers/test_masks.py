"""Tests that no value at a masked position changes any result, to the bit.

test_fuzz.py compares outputs, derivatives and memory with those of a batch without padding.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import InstanceNorm
from eqx_norm.strategies import Batch, Renorm, VarianceClip
from tests.compiling import filter_jit, jit
from tests.helpers import bits, copy, make, normal, same, y_and_gradients
from tests.layers.norms import NAMES, made, mask_shape, with_parameters

N, C, L = 6, 3, 5
X, DY = normal(0, (N, C, L), 1, 2), normal(1, (N, C, L))
LENGTHS = np.arange(L) < np.array([0, 5, 2, 4, 1, 3])[:, None]
NOTHING, ONE = np.zeros((2, N, L), bool)
ONE[2, 3] = True


def spoil(x, mask):
    """Returns `x` with NaN, infinities and 1e30 at the masked positions."""
    garbage = np.resize([np.nan, np.inf, -np.inf, 1e30], x.shape)
    # NumPy computes this, because `jax_debug_nans` would stop an operation of JAX.
    return jax.device_put(np.where(mask[:, None], x, garbage).astype(x.dtype))


def activation(u):
    """Computes a function that is neither 0 nor flat at u = 0, the u of masked positions."""
    return jax.nn.softplus(u + 0.5)


@filter_jit
def step(layer, state, x, mask):
    """Returns y, the state, and the gradients of sum(y * DY) in the layer and x."""

    def forward(layer, x):
        def one(x, mask):
            return layer(x, copy(state), mask=mask)

        return jax.vmap(one, axis_name="batch", out_axes=(0, None))(x, mask)

    return y_and_gradients(forward, DY, layer, x, has_aux=True)


@pytest.mark.nans
@pytest.mark.parametrize(
    ("name", "function"),
    [
        *(("BatchNorm", function) for function in (None, activation, jax.nn.softmax)),
        *((name, jnp.log) for name in NAMES),  # NaN or infinite for many u
    ],
)
def test_gradients_of_masked_values_are_0_whatever_x_and_dy_hold(name, function):
    layer, call = made(name, (C, L), activation=function)
    of_values = np.broadcast_to(LENGTHS[:, None], X.shape)
    mask = of_values if mask_shape(name, X.shape) == X.shape else LENGTHS

    def forward(weight, bias, x):
        return call(with_parameters(layer, weight, bias), x, mask)[0]

    @jit
    def derive(x, dy):
        return y_and_gradients(forward, dy, layer.weight, layer.bias, x)

    # The cotangents of masked outputs have no effect.
    chex.assert_trees_all_equal(derive(X, spoil(DY, LENGTHS)), derive(X, DY))
    for value in (np.nan, np.inf):
        y, dweight, _, dx = derive(X.at[1, 0, 0].set(value), DY)  # not masked
        assert not np.isfinite(dweight).all()
        for array in (y, dx):
            np.testing.assert_array_equal(array[~of_values], 0)


@pytest.mark.parametrize(
    ("approach", "mask"),
    [
        ("ema", NOTHING),
        ("adam", NOTHING),
        ("smooth_start", NOTHING),
        (VarianceClip(Batch(0.7), ratio=1.5, start=1), NOTHING),
        (Renorm(0.7, r_max=1.5, d_max=0.5), NOTHING),
        ("batch", ONE),
    ],
)
def test_masked_out_batch_changes_no_memory(approach, mask):
    """Masks out all values, or all but one, which has no unbiased variance."""
    options = {"activation": activation, "unbiased": mask is ONE}
    layer, state = make(C, "batch", approach=approach, **options)
    _, trained, *_ = step(layer, state, X, None)
    for before in (state, trained):
        y, after, gradient, dx = step(layer, before, spoil(X, mask), mask)
        assert same(after, before)
        for array in (y, dx):
            assert bits(array[~np.broadcast_to(mask[:, None], X.shape)]).strip(b"\0") == b""
        chex.assert_tree_all_finite((y, gradient))
        # The next batch counts in full, also if the masked batch was the first one.
        assert same(step(layer, after, X, None), step(layer, before, X, None))


@pytest.mark.nans
def test_batch_of_a_single_nan_is_rejected():
    layer, state = make(C, "batch", approach="batch", unbiased=True)
    for mask, rejected in ((ONE, 1), (NOTHING, 0)):
        _, after, *_ = step(layer, state, jnp.full_like(X, jnp.nan), mask)
        assert after.get(layer.memory_index).counts.tolist() == [0, rejected]


@pytest.mark.x32
@pytest.mark.parametrize(
    ("length", "act", "x64"),
    [
        (5, None, False),
        (5, jax.nn.gelu, True),
        (8, jax.nn.relu, False),
        (8, None, True),
        (37, jax.nn.gelu, False),
        (37, jax.nn.relu, True),
    ],
)
def test_one_value_has_a_gradient_of_exactly_0(length, act, x64):
    """Fails where a compiler contracts the product of weight and cotangent with a sum."""
    with jax.enable_x64(x64):
        layer = InstanceNorm(3, affine=True, activation=act)
        random = np.random.RandomState(0)
        weight, bias = jnp.asarray(random.standard_normal((2, 3)), float)
        layer = with_parameters(layer, weight, bias)
        x, dy = jnp.asarray(random.standard_normal((2, 4, 3, length)), float)
        mask = np.arange(length) == length - 1

        @jax.jit
        @jax.grad
        def gradient(x):
            return (jax.vmap(lambda x: layer(x, mask=mask))(x) * dy).sum()

        np.testing.assert_array_equal(gradient(x), np.zeros(x.shape))
