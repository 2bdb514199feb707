"""Tests that programs compiled for a CPU call no function that a kind of processor rounds by
place.

Since jax 0.12 XLA:CPU computes `rsqrt` by the processor's approximation and Newton's method.
With AVX-512 the vectorised part of a loop rounds the method's products, and its remainder does
not, so that the last bit of a number depends on the number of rows. These tests fail on any
processor.
"""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from tests.compiling import jit
from tests.helpers import each_approach, make, over_batch
from tests.layers.norms import NAMES, made, mask_shape

pytestmark = pytest.mark.x32  # has its own dtypes

SHAPE = N, C, H, W = 3, 6, 3, 5
DTYPES = [("float32", False), ("bfloat16", True), ("float16", False), ("complex64", True)]
# Each norm in two dtypes.
CASES = [(name, *DTYPES[(i + j) % 4]) for i, name in enumerate(NAMES) for j in (0, 1)]


def calls_rsqrt(function, *arguments):
    compiled = jit(function).lower(*arguments).compile()
    return re.search(r"\brsqrt\(", str(compiled.as_text())) is not None


def every_direction(forward):
    """Returns a function that returns y, the gradients of sum(|y|^2), and the forward
    derivative."""

    def loss(*point):
        return jnp.sum(jnp.abs(forward(*point)) ** 2, dtype=float)

    def call(*point):
        return forward(*point), jax.grad(loss, (0, 1))(*point), jax.jvp(forward, point, point)

    return call


def test_the_search_finds_rsqrt():
    assert calls_rsqrt(lambda x: 1 / jnp.sqrt(x), jnp.ones(8))


@pytest.mark.parametrize(("name", "dtype", "masked"), CASES)
def test_no_norm_calls_rsqrt_in_training(name, dtype, masked):
    layer, call = made(name, SHAPE[1:], dtype=dtype if dtype == "complex64" else None)
    weights, static = eqx.partition(layer, eqx.is_inexact_array)
    mask = jnp.arange(W) > jnp.zeros(mask_shape(name, SHAPE)) if masked else None
    x = jnp.ones(SHAPE, dtype)
    forward = every_direction(lambda w, x: call(eqx.combine(w, static), x, mask)[0])
    assert not calls_rsqrt(forward, weights, x)


@each_approach
def test_no_approach_calls_rsqrt(approach):
    """Tests y, its derivatives and the new state, in training and in inference."""
    layer, state = make(C, "batch", approach=approach)
    x = jnp.ones(SHAPE)
    for model in (layer, eqx.nn.inference_mode(layer)):
        forward = every_direction(lambda _, x, model=model: over_batch(model)(x, state)[0])
        assert not calls_rsqrt(forward, x, x)
        assert not calls_rsqrt(lambda x, model=model: over_batch(model)(x, state), x)
