"""Tests that x itself and vectors are the only residuals, of a layer and in networks."""

import functools
import math
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqx_norm._jax import jaxprs
from eqx_norm._normalise.moments_primitives import AFFINE, DOT_PRODUCTS, MOMENTS, STATISTICS
from eqx_norm._normalise.norm_primitives import NORM
from eqx_norm.models import recompute_outputs
from tests.helpers import APPROACHES, normal
from tests.layers.norms import EXAMPLE_NORMS, made

DEPTH, SHAPE = 3, (4, 6, 5, 7)
PRELU = eqx.nn.PReLU(0.25)
ACTIVATIONS = {"none": None, "relu": jax.nn.relu, "gelu": jax.nn.gelu, "prelu": PRELU}
SILU = {"activation": jax.nn.silu}
MASK = jnp.ones((SHAPE[0], *SHAPE[2:]), bool)


def norm(name, mask=None, **options):
    """Returns a layer, and `call(layer, x)` for a batch."""
    layer, call = made(name, SHAPE[1:], **options)
    return layer, lambda layer, x: call(layer, x, mask)[0]


LAYERS = {
    **{name: norm("BatchNorm", activation=ACTIVATIONS[name]) for name in ACTIVATIONS},
    **{name: norm(name) for name in EXAMPLE_NORMS},
    **{f"{name}, gelu": norm(name, activation=jax.nn.gelu) for name in EXAMPLE_NORMS},
    **{approach: norm("BatchNorm", approach=approach, **SILU) for approach in APPROACHES},
    "mask": norm("BatchNorm", MASK, **SILU),
    "kernel": norm("LayerNorm", implementation="pallas"),
}


def held(layer, call, x):
    """Returns how often the function of the backward pass holds x itself, and what else."""
    moving, static = eqx.partition(layer, eqx.is_inexact_array)

    def backward(moving, x):
        return jax.vjp(lambda moving, x: call(eqx.combine(moving, static), x), moving, x)[1]

    traced = jax.make_jaxpr(backward)(moving, x).jaxpr
    of_x = [var is traced.invars[-1] for var in traced.outvars]
    others = zip(traced.outvars, of_x, strict=True)
    return sum(of_x), [var.aval for var, is_x in others if not is_x]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("layer", "call"), LAYERS.values(), ids=LAYERS)
def test_residuals_are_x_itself_and_vectors(layer, call, dtype):
    """Checks that a vector has a number for each channel or position of each example, or a pair
    for each channel, or is a parameter. A mask is saved as booleans, once for all channels."""
    x = normal(0, SHAPE).astype(dtype)
    times, others = held(layer, call, x)
    assert times == 1
    parameters = jax.tree.leaves(eqx.filter(layer, eqx.is_array))
    along_channels = getattr(layer, "axis", None) == 0
    vector = math.prod(SHAPE) // SHAPE[1] if along_channels else math.prod(SHAPE[:2])
    largest = max([vector, *map(jnp.size, parameters)])
    assert max(kept.size for kept in others if kept.dtype != bool) <= largest
    assert all(kept.size < x.size for kept in others if kept.dtype == bool)


# --- Networks save x once, in its own shape; a neighbour that saves x shares the array.


def stacked(f, *operands):
    """Returns shape and dtype of the large residuals of each layer in the scan of `grad(f)`."""

    def loss(*operands):
        return jnp.sum(f(*operands).astype(jnp.float32))

    closed = jax.make_jaxpr(jax.grad(loss, tuple(range(len(operands)))))(*operands)
    scans = (e for e in jaxprs.equations(closed.jaxpr) if e.primitive.name == "scan")
    types: list[Any] = [var.aval for var in next(scans).outvars]
    kept = [a for a in types if a.shape[:1] == (DEPTH,)]
    return [(a.shape[1:], a.dtype) for a in kept if a.size >= DEPTH * math.prod(SHAPE)]


def conv(x, weight):
    return jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME")


def between(after=lambda x, y: y):
    """Returns a block of a convolution, the norm, the function `after` and a convolution."""
    return lambda norm, x, w: conv(after(x, norm(conv(x, w[0]))), w[1])


def dropped(x, y):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, y.shape), y, 0)


NEIGHBOUR = lambda norm, x, w: conv(x, w[0]) + norm(x)  # noqa: E731
RESIDUAL = between(lambda x, y: jax.nn.relu(x + y))
POLICY = functools.partial(jax.checkpoint, policy=recompute_outputs)
# Activation in the layer, block, its wrapper, numbers of residuals like x and of booleans.
BLOCKS = {
    # The inputs of the convolutions and of the norm with its activation.
    "relu": (jax.nn.relu, between(), None, 3, 0),
    "prelu": (PRELU, between(), None, 3, 0),
    # The ReLU also saves a boolean array of its positive inputs.
    "relu after": (None, between(lambda x, y: jax.nn.relu(y)), None, 3, 1),
    "neighbour": (jax.nn.silu, NEIGHBOUR, None, 1, 0),
    # The inputs of the first convolution and of the norm, whatever follows the norm.
    "policy, relu": (jax.nn.relu, between(), POLICY, 2, 0),
    "policy, prelu": (PRELU, between(), POLICY, 2, 0),
    "policy, gelu after": (None, between(lambda x, y: jax.nn.gelu(y)), POLICY, 2, 0),
    "policy, prelu after": (None, between(lambda x, y: PRELU(y)), POLICY, 2, 0),
    "policy, dropout after": (None, between(dropped), POLICY, 2, 0),
    "policy, residual": (None, RESIDUAL, POLICY, 2, 0),
}


@pytest.mark.parametrize(
    ("name", "network"),
    [
        *(("BatchNorm", network) for network in BLOCKS),
        *product(EXAMPLE_NORMS, ["prelu", "policy, prelu"]),
    ],
)
def test_residuals_of_scanned_networks(name, network):
    activation, block, wrap, like_x, bools = BLOCKS[network]
    layer, call = norm(name, activation=activation)
    weights = normal(1, (DEPTH, 2, SHAPE[1], SHAPE[1], 3, 3)).astype(jnp.bfloat16)

    def scanned(x, weights):
        def step(x, w):
            return block(lambda x: call(layer, x), x, w), None

        return jax.lax.scan(wrap(step) if wrap else step, x, weights)[0]

    kept = stacked(scanned, normal(0, SHAPE).astype(jnp.bfloat16), weights)
    if (name, network) == ("BatchNorm", "policy, prelu"):
        like_x += 1  # an activation with arrays is a checkpoint of its own, which saves x again
    expected = [(SHAPE, jnp.bfloat16)] * like_x + [(SHAPE, bool)] * bools
    assert sorted(kept, key=str) == sorted(expected, key=str)


def test_policy_saves_vectors_and_no_outputs():
    """Fails if a primitive gets a name that the policy does not know."""
    assert all(map(recompute_outputs, (STATISTICS, MOMENTS, DOT_PRODUCTS)))
    assert not any(map(recompute_outputs, (AFFINE, NORM)))
