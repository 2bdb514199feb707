"""Tests `eqx_norm.moments` and `eqx_norm.normalise`, the halves of a norm for plain arrays."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_norm
from eqx_norm import GroupNorm, LayerNorm
from eqx_norm.strategies import Moments
from tests.compiling import jit
from tests.helpers import make, normal, over_batch, y_and_gradients

pytestmark = pytest.mark.x32  # has its own dtypes
UNOPTIMISED = True  # compares values: tests/compiling.py
X = normal(0, (4, 6, 5, 3), 100, 2)
AXES = [None, 1, -1, (0, 2, 3), (1, -1), (2, 3), (0, 1, 2), ()]
MASKS = {
    "": None,
    "values": X > 99,
    "positions": X[:1, :1] > 100,
    "examples": X[:, :1, :1, :1] > 100,
}
KINDS = [("float32", mask) for mask in MASKS] + [("bfloat16", ""), ("complex64", "values")]
# Each axis with two kinds of x, and each kind with two axes or three.
CASES = [(axis, *KINDS[(i + j) % len(KINDS)]) for i, axis in enumerate(AXES) for j in (0, 2)]


@pytest.mark.parametrize(("axis", "dtype", "mask"), CASES)
def test_moments_are_those_of_numpy(axis, mask, dtype):
    x, counted = X.astype(dtype), MASKS[mask]
    x = x * (1 + 1j) if dtype == "complex64" else x
    exact = np.asarray(x.astype("complex64" if dtype == "complex64" else "float32"))
    exact = exact.astype(np.clongdouble if dtype == "complex64" else np.longdouble)
    where = np.broadcast_to(True if counted is None else np.asarray(counted), x.shape)
    axes = tuple(range(4)) if axis is None else axis
    count = where.sum(axes, keepdims=True)
    mean = np.where(where, exact, 0).sum(axes, keepdims=True) / np.maximum(count, 1)
    m2 = np.where(where, abs(exact - mean) ** 2, 0).sum(axes, keepdims=True)
    found = eqx_norm.moments(x, axis, mask=counted)
    shape = np.squeeze(mean, axes).shape or (1,)
    assert found.mean.shape == found.m2.shape == shape
    np.testing.assert_array_equal(
        jnp.broadcast_to(found.known_count, shape), count.reshape(shape)
    )
    np.testing.assert_allclose(found.mean, mean.reshape(shape), rtol=3e-7)
    np.testing.assert_allclose(found.m2, m2.reshape(shape), rtol=2e-6, atol=1e-4)


def test_both_halves_are_the_layers():
    """Compares values and gradients with those of the layers."""
    x, dy, weight, bias = X, normal(1, X.shape), normal(2, (6,)), normal(3, (6,))
    norm, state = make(6, "batch", approach="batch", activation=jax.nn.relu)
    norm = eqx.tree_at(lambda norm: (norm.weight, norm.bias), norm, (weight, bias))
    layer = LayerNorm(3, use_weight=False, use_bias=False)
    groups = GroupNorm(3, channelwise_affine=False)
    column = weight[:, None, None], bias[:, None, None]

    def of(axis, *weights, shape=X.shape, **options):
        def norm(x):
            x = x.reshape(shape)
            moments = eqx_norm.moments(x, axis)
            y = eqx_norm.normalise(x, moments, *weights, axis=axis, **options)
            return y.reshape(X.shape)

        return norm

    for ours, theirs in (
        (
            of((0, 2, 3), *column, activation=jax.nn.relu),
            lambda x: over_batch(norm)(x, state)[0],
        ),
        (of(-1), jax.vmap(jax.vmap(jax.vmap(layer)))),
        (of((2, 3, 4), shape=(4, 3, 2, 5, 3)), jax.vmap(groups)),
    ):
        (y, dx), (expected, expected_dx) = (
            jit(y_and_gradients, static_argnums=0)(f, dy, x) for f in (ours, theirs)
        )
        np.testing.assert_allclose(y, expected, rtol=1e-6, atol=2e-6)
        np.testing.assert_allclose(dx, expected_dx, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("given", [(X[:2],), (X[:2], X[:2] > 99)])
def test_moments_over_named_axes_and_of_tiles_are_those_of_the_whole(given):
    """Keeps two axes, the first of size 2, like the parts of a pair."""

    def of(x, mask=None, axis=(-1,), **names):
        return eqx_norm.moments(x, axis, mask=mask, **names)

    whole = of(*given, axis=(2, 3))
    mapped = jax.vmap(lambda *row: of(*row, axis_name="i"), 2, None, axis_name="i")(*given)
    merged = of(X[:2, :, :0], axis=(2, 3))
    for row in zip(*(jnp.unstack(a, axis=2) for a in given), strict=True):
        merged = merged.merge(of(*row))
    for found in (mapped, merged):
        np.testing.assert_array_equal(found.count, whole.count)
        np.testing.assert_allclose(found.mean, whole.mean, rtol=2e-7)
        np.testing.assert_allclose(found.variance, whole.variance, rtol=2e-6)


def test_a_constant_is_exact_and_the_residual_is_x():
    constant = jnp.full((7, 121), 1234.567)
    y = eqx_norm.normalise(constant, eqx_norm.moments(constant, 1), axis=1)
    np.testing.assert_array_equal(y, np.zeros(y.shape))
    half = X.astype(jnp.bfloat16)

    def norm(x):
        moments = eqx_norm.moments(x, (0, 2, 3))
        return eqx_norm.normalise(x, moments, axis=(0, 2, 3), activation=jnp.tanh)

    kept = [a for a in jax.tree.leaves(jax.vjp(norm, half)[1]) if a.size == X.size]
    assert {a.dtype.name for a in kept} <= {"bfloat16"}


@pytest.mark.parametrize(
    ("dtype", "mask"),
    [("float32", X[..., :1] > 100), ("bfloat16", None), ("complex64", X[..., :1] > 100)],
)
def test_denormalise_is_the_inverse_of_normalise(dtype, mask):
    """Compares the values with x, the gradients with those of the formula in float64."""
    x, weight, bias = (X * (1 + 1j if "complex" in dtype else 1)).astype(dtype), 1.5, -0.25
    of_rows = eqx_norm.moments(x, 1)

    def inverse(y, weight, bias, mean, variance):
        used, options = Moments.of(mean, variance), {"axis": 1, "mask": mask}
        return eqx_norm.denormalise(y, used, weight, bias, **options)

    y = eqx_norm.normalise(x, of_rows, weight, bias, axis=1, mask=mask)
    back = eqx_norm.denormalise(y, of_rows, weight, bias, axis=1, mask=mask)
    assert back.dtype == x.dtype
    counts = np.broadcast_to(True if mask is None else mask, x.shape)
    eps = float(jnp.finfo(dtype).eps)
    # y is rounded, times the standard deviation of at most 8; x of 100 is rounded.
    np.testing.assert_allclose(
        np.asarray(back, np.complex64), np.where(counts, x, 0), rtol=2 * eps, atol=32 * eps
    )

    def formula(y, weight, bias, mean, variance):
        std = jnp.sqrt(jnp.expand_dims(variance, 1) + 1e-5)
        x = (jnp.where(counts, y, 0) - bias) / weight * std + jnp.expand_dims(mean, 1)
        return jnp.where(counts, x, 0)

    if dtype == "float32":
        arrays = y, weight, bias, of_rows.mean, of_rows.variance
        with jax.enable_x64(True):
            exact = [jnp.asarray(array, float) for array in arrays]
            expected = jax.vjp(formula, *exact)[1](jnp.cos(X.astype(float)))
        found = jax.vjp(inverse, *arrays)[1](jnp.cos(X))
        # Each is a sum of terms of at most 16, which are rounded some 4 times.
        for gradient, wanted in zip(found, expected, strict=True):
            atol = x.size // gradient.size * 16 * 4 * 2.0**-24
            np.testing.assert_allclose(gradient, wanted, rtol=0, atol=atol)
    residuals = jax.tree.leaves(jax.vjp(inverse, y, weight, bias, *arrays_of(of_rows))[1])
    assert {a.dtype for a in residuals if a.size == x.size and a.dtype != bool} == {x.dtype}


LIST: Any = [1.0, 2.0]
MEAN: Any = X.mean(0)


def arrays_of(moments):
    return moments.mean, moments.variance


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: eqx_norm.moments(X, 4), r"axis 4 is out of bounds"),
        (lambda: eqx_norm.moments(X, (1, 1)), r"repeated axis"),
        (lambda: eqx_norm.moments(X, mask=X[:, 0] > 0), r"mask has shape \(4, 5, 3\), which"),
        (
            lambda: eqx_norm.normalise(X, eqx_norm.moments(X, 0)),
            r"mean of shape \(6, 5, 3\), but",
        ),
        (
            lambda: eqx_norm.normalise(X, MEAN, MEAN),
            r"f32\[6,5,3\]: .*Moments\.of\(mean",
        ),
        (lambda: eqx_norm.moments(LIST), r"x is \[1.0, 2.0\], .* jnp.asarray\(x\)"),
        (lambda: eqx_norm.moments(X, mask=np.ones(3)), "mask has dtype float64"),
        (lambda: eqx_norm.denormalise(LIST, Moments.of(0.0, 1.0)), "y is .* jnp.asarray.y"),
        (lambda: eqx_norm.denormalise(X, Moments.of(0.0, 1j)), "variance has dtype complex"),
        (lambda: eqx_norm.normalise(X, Moments.of(0.0, 1.0), jnp.ones(6)), r"6,\).*t\[:, None"),
    ],
)
def test_errors_quote_what_was_given(call, message, unchecked):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
