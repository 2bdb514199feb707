"""Tests the variants of sums and gradients that are lowered for a GPU.

Their bytes show only in a program that XLA compiles for a GPU: `make gpu-compile-check` counts
them, and needs jax's plugin. The numbers here, in bytes of x, were counted with jax 0.12.0.1.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise.variants import on_gpu
from tests.compiling import jit
from tests.helpers import f32, y_and_gradients
from tests.layers.norms import made

SILU = jax.nn.silu


def lowered(name, shape, activation=None, *, is_frozen=False):
    """Returns a GPU's program of y and its gradients, of x alone if the weights are frozen."""
    options = {} if activation is None else {"activation": activation}
    layer, call = made(name, shape[1:], **options)
    weights, static = eqx.partition(layer, eqx.is_inexact_array)

    def forward(weights, x):
        return call(eqx.combine(weights, static), x)[0]

    def program(weights, x):
        if is_frozen:
            return y_and_gradients(lambda x: forward(weights, x), x, x)
        return y_and_gradients(forward, x, weights, x)

    traced = jax.jit(program).trace(weights, jnp.zeros(shape))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


# Norm, shape, activation, frozen weights, and the number of barriers.
BARRIERS = [
    # Four and three vectors, behind 1, 2 and 3 barriers in the passes over x. Without them x -
    # mean and the activation's derivative are written: with a GELU 7 units more.
    # Another cuts the sum over the first sixteenth of x.
    ("BatchNorm", (8192, 8), SILU, False, 4 * (1 + 2) + 1),
    ("LayerNorm", (64, 384), SILU, False, 3 * (1 + 2 + 3)),
    # Before the statistics of the gradient of x: without it 7.0 in place of 5.0.
    ("LayerNorm", (64, 384), None, True, 1),
    # Also before those of the gradients of weights: without it 10.0 in place of 9.0.
    ("LayerNorm", (64, 32), None, False, 1 + 2),
    # Also at each reshape to rows and back: without them 20.0 in place of 3.1.
    ("GroupNorm", (8, 12, 14, 14), None, True, 1 + 9),
]


@pytest.mark.parametrize(("name", "shape", "activation", "is_frozen", "barriers"), BARRIERS)
def test_barriers_between_passes(name, shape, activation, is_frozen, barriers):
    text = lowered(name, shape, activation, is_frozen=is_frozen)
    assert text.count("optimization_barrier") == barriers


def test_two_sums_over_examples_are_one_reduction_of_one_array():
    """Without it the activation's derivative is written: with a GELU 5 units more."""
    lines = lowered("BatchNorm", (8192, 8), SILU).splitlines()
    assert sum("stablehlo.reduce(" in line and "ui64" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("shape", "axes"), [((5, 3), [0]), ((2048, 4), [0]), ((8, 3, 7), [0, 2])]
)
def test_packed_sums(shape, axes):
    """Sums integers, which is exact in any order."""
    values = np.random.default_rng(0).integers(-9, 10, (2, *shape))
    expected = values.sum(tuple(axis + 1 for axis in axes), keepdims=True)
    sums = jit(lambda a, b: on_gpu.packed_sums([a, b], axes))(*f32(values))
    for actual, exact in zip(sums, expected, strict=True):
        np.testing.assert_array_equal(actual, exact)
        assert actual.dtype == np.float32
