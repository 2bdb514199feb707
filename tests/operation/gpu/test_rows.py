"""Tests the kernels for whole rows, interpreted on a CPU, against the formula."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise import rows
from eqx_norm._normalise.gpu import triton_rows
from tests.compiling import jit
from tests.helpers import bits

from .backends import EPS


def arrays(shape, dtype="float32", mean=0.0):
    """Returns x, g, weight and bias, as `rows` has them."""
    rng = np.random.default_rng(0)
    count, values = shape
    x, g = rng.normal(size=(2, count, 1, values))
    weight, bias = rng.normal(1, 0.3, (2, 1, 1, values)).astype("float32")
    return *(jnp.asarray(v, dtype) for v in (x + mean, g)), *map(jnp.asarray, (weight, bias))


@functools.partial(jit, static_argnames="activation")
def reference(x, g, *affine, activation):
    """Returns y, and the gradients of x, weight and bias."""

    def normalised(x, *affine):
        d = x - x.mean(-1, keepdims=True)
        u = d / jnp.sqrt((d * d).mean(-1, keepdims=True) + EPS)
        u = affine[0] * u + affine[1] if affine else u
        return u if activation is None else activation(u)

    y, pull = jax.vjp(normalised, x, *affine)
    return y, *pull(g)


@functools.partial(jit, static_argnames=("activation", "learns"))
def by_kernels(x, g, *affine, activation=None, learns=True):
    arguments: Any = {"row": rows.Row(EPS, activation, "auto"), "interpret": True}
    y, *moments = triton_rows.rows(x, *affine, **arguments)
    learns = learns and bool(affine)
    cotangents = triton_rows.rows_vjp(g, x, *affine, *moments, learns=learns, **arguments)
    return y, *cotangents


@jit
def forward(x, *affine):
    return triton_rows.rows(x, *affine, row=rows.Row(EPS, None, "auto"), interpret=True)


# Ragged in every direction: rows that share a program, a warp each, and all the warps of one.
@pytest.mark.parametrize(
    ("shape", "activation", "operands"),
    [
        *((shape, None, 4) for shape in ((5, 1), (300, 3), (37, 64), (9, 100), (3, 1500))),
        ((2, 4096), None, 4),
        ((70, 513), jax.nn.relu, 4),
        ((37, 64), jax.nn.silu, 4),
        ((37, 200), None, 2),  # without weight and bias
    ],
)
def test_values_and_gradients(shape, activation, operands):
    given = arrays(shape, mean=3.0)[:operands]
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(v, "float64")) for v in given)
        right = reference(*wide, activation=activation)
    found = by_kernels(*given, activation=activation)
    assert [v.shape for v in found] == [v.shape for v in right]
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * max(1, np.abs(b).max()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    """Tests that results are those of float32, rounded once."""
    given = arrays((37, 200), dtype, mean=2.0)
    right = by_kernels(*(v.astype("float32") for v in given))
    found = by_kernels(*given)
    assert [v.dtype.name for v in found] == [dtype, dtype, "float32", "float32"]
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    for a, b in zip(found[:2], right[:2], strict=True):
        np.testing.assert_allclose(a.astype("float32"), b, rtol=half_ulp, atol=1e-6)
    for a, b in zip(found[2:], right[2:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)


def test_where_weight_and_bias_do_not_learn():
    given = arrays((37, 200))
    (_, dx), (_, right, _, _) = by_kernels(*given, learns=False), by_kernels(*given)
    np.testing.assert_allclose(dx, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("values", [7, 121, 1000])
def test_a_constant_row_gives_exactly_the_bias(values):
    constants = jnp.asarray([1e-3, 0.1, 1 / 3, 7.7, 1000.1, 65504.0])
    x = jnp.broadcast_to(constants[:, None, None], (6, 1, values))
    _, _, weight, bias = arrays((6, values))
    y, _, m2, _ = forward(x, weight, bias)
    assert bits(m2) == bits(np.zeros((6, 1, 1), "float32"))
    assert bits(y) == bits(np.broadcast_to(bias, y.shape))


def test_the_moments_far_from_zero():
    """Holds them to the bounds of tests/layers/test_accuracy.py."""
    x, *_ = arrays((20, 1000), mean=1e6)
    mean, m2, mean_rest = (np.asarray(v, "float64") for v in forward(x)[1:])
    wide = np.asarray(x, "float64")
    variance = wide.var(-1, keepdims=True)
    assert mean.shape == m2.shape == (20, 1, 1)
    assert (np.abs(m2 / 1000 - variance) <= 5e-7 * (variance + EPS)).all()
    error = mean + mean_rest - wide.mean(-1, keepdims=True)
    assert (np.abs(error) <= 2e-7 * np.sqrt(variance + EPS)).all()


def test_the_sums_are_exact_enough_over_many_rows():
    """Holds sums to 2e-7 of the sum of what is added."""
    x, g, *affine = arrays((20000, 8))
    *_, dbias = by_kernels(x, jnp.abs(g), *affine)
    right = np.abs(np.asarray(g, "float64")).sum(0, keepdims=True)
    assert (np.abs(dbias - right) <= 2e-7 * right).all()
