"""Tests that JAX lowers every layer for GPUs and TPUs, on a machine that has none: each direction
and dtype, with and without mask, activation and weights, and batch norm with every approach.

Values are tested on a CPU, where other rules lower the passes.
"""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqx_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from tests.helpers import APPROACHES, copy, make

N, C, H, W = 2, 4, 3, 5
SHAPE = C, H, W


def batch_norm(approach):
    def made(weights, **how):
        layer, state = make(C, "batch", channelwise_affine=weights, approach=approach, **how)
        return lambda layer, x, mask: layer(x, copy(state), mask=mask)[0], layer

    return made


def alone(kind, *arguments, names):
    """Returns a maker of a norm of one example; `names`: the arguments for its weights."""

    def made(weights, **how):
        layer = kind(*arguments, **dict.fromkeys(names, weights), **how)
        return lambda layer, x, mask: layer(x, mask=mask), layer

    return made


BOTH = "use_weight", "use_bias"
LAYERS = {name: batch_norm(name) for name in APPROACHES} | {
    "LayerNorm": alone(LayerNorm, SHAPE, names=BOTH),
    "LayerNorm of vectors": alone(LayerNorm, W, names=BOTH),
    "RMSNorm": alone(RMSNorm, SHAPE, names=BOTH),
    "GroupNorm": alone(GroupNorm, 2, C, names=["channelwise_affine"]),
    "InstanceNorm": alone(InstanceNorm, C, names=["affine"]),
}


def directions(call, layer, masked, dtype):
    """Returns y and all derivatives of a layer as functions of x, in one function."""
    weights, static = eqx.partition(layer, eqx.is_inexact_array)
    shape = (W,) if getattr(layer, "shape", None) == (W,) else SHAPE
    mask = jnp.arange(W) > 0 if masked and len(shape) > 1 else None

    def forward(weights, x):
        f = lambda x: call(eqx.combine(weights, static), x, mask)  # noqa: E731
        return jax.vmap(f, axis_name="batch")(x)

    def every(x):
        loss = lambda weights, x: jnp.sum(forward(weights, x) ** 2, dtype=float)  # noqa: E731
        return (
            forward(weights, x),
            jax.grad(loss, (0, 1))(weights, x),
            jax.grad(loss, 1)(weights, x),
            jax.jvp(forward, (weights, x), (weights, x)),
        )

    return every, jax.ShapeDtypeStruct((N, *shape), dtype)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lowered_for_every_platform(name, dtype):
    for masked, weights, activation in itertools.product(
        (False, True), (False, True), (None, jax.nn.silu)
    ):
        made = LAYERS[name](weights, activation=activation)
        f, x = directions(*made, masked, dtype)
        traced = jax.jit(f).trace(x)
        for platform in ("cuda", "tpu"):
            traced.lower(lowering_platforms=(platform,))
