"""Tests what norms cost on XLA:CPU where little or nothing stands between them.

Counted on the compiled program: timings vary, counts do not. The reasons are in docs/design.md,
"Norms one after another".
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqx_norm import BatchNorm
from tests.helpers import copy, normal

SHAPE = (16, 8, 16, 16)
WEIGHT = normal(1, (SHAPE[1], SHAPE[1], 3, 3))

pytestmark = pytest.mark.x32  # what is counted depends on the dtype


def alone(norm, x):
    return norm(x)


def behind_a_barrier(norm, x):
    return jax.lax.optimization_barrier(norm(x))


def residual(norm, x):
    """Returns a pre-activation residual block of x."""
    y = jax.lax.conv_general_dilated(jax.nn.relu(norm(x))[None], WEIGHT, (1, 1), "SAME")
    return x + y[0]


def compiled(block, number):
    """Returns the compiled forward and backward pass of a chain of blocks with norms."""

    def make():
        return [BatchNorm(SHAPE[1], "batch", approach="batch") for _ in range(number)]

    layers, state = eqx.nn.make_with_state(make)()
    moving, static = eqx.partition(layers, eqx.is_inexact_array)

    def forward(moving, x):
        def one(x):
            for layer in eqx.combine(moving, static):
                x = block(lambda x, layer=layer: layer(x, copy(state))[0], x)
            return x

        return jax.vmap(one, axis_name="batch")(x)

    def both(moving, x, dy):
        y, pullback = jax.vjp(forward, moving, x)
        return y, pullback(dy)

    x = jnp.zeros(SHAPE)
    return jax.jit(both).lower(moving, x, x).compile()


def count(program, name):
    return program.cost_analysis()[name]


def temporaries(program):
    return program.memory_analysis().temp_size_in_bytes


def test_a_chain_moves_less_than_its_norms_and_keeps_nothing_between_them():
    one, three = compiled(alone, 1), compiled(alone, 3)
    assert count(three, "bytes accessed") < 3 * count(one, "bytes accessed")
    assert temporaries(three) < jnp.zeros(SHAPE).nbytes


@pytest.mark.parametrize(
    "block",
    [
        residual,
        pytest.param(
            behind_a_barrier,
            marks=pytest.mark.skipif(
                jax.__version_info__ < (0, 12), reason="XLA:CPU removes barriers, then fuses"
            ),
        ),
    ],
)
def test_kept_apart_norms_calculate_no_more_than_their_sum(block):
    one, three = compiled(block, 1), compiled(block, 3)
    assert count(three, "flops") <= 3 * count(one, "flops")
