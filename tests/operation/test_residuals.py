"""Tests that x itself is kept for the backward pass, and but vectors beside it."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import GroupNorm, LayerNorm, RMSNorm
from eqx_norm._normalise import jaxprs
from eqx_norm.models import recompute_outputs
from tests.helpers import APPROACHES, make, normal, over_batch

DEPTH, SHAPE = 3, (4, 5, 6, 7)
ACTIVATIONS = {
    "none": None,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "prelu": eqx.nn.PReLU(0.25),
}


def batch_norm(activation=None, approach="batch", **arguments):
    """Returns a layer, and how it is called for a batch."""
    layer, state = make(
        SHAPE[1], "batch", approach=approach, activation=activation, **arguments
    )
    return layer, lambda layer, x: over_batch(layer)(x, state)[0]


def of_examples(make_norm, *sizes):
    """Returns a function like `batch_norm`, for a norm of one example."""
    return lambda activation=None: (make_norm(*sizes, activation=activation), of_each)


def of_each(layer, x):
    return jax.vmap(layer)(x)


NORMS = {
    "BatchNorm": batch_norm,
    "LayerNorm": of_examples(LayerNorm, SHAPE[1:]),
    "GroupNorm": of_examples(GroupNorm, 1, SHAPE[1]),
    "RMSNorm": of_examples(RMSNorm, SHAPE[1:]),
}
each_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])


def held(layer, call, x):
    """Returns what the function of the backward pass holds."""
    moving, static = eqx.partition(layer, eqx.is_inexact_array)

    def f(moving, x):
        return call(eqx.combine(moving, static), x)

    _, backward = jax.vjp(f, moving, x)
    return jax.tree.leaves(backward)


@each_norm
@each_dtype
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_x_itself_is_kept_and_vectors(norm, dtype, name):
    x, (layer, call) = normal(0, SHAPE).astype(dtype), norm(ACTIVATIONS[name])
    kept = held(layer, call, x)
    vectors = [leaf for leaf in kept if leaf is not x]
    assert len(vectors) < len(kept)
    each = SHAPE[0] if isinstance(layer, GroupNorm) else 1  # a vector for each example
    parameters = jax.tree.leaves(eqx.filter(layer, eqx.is_array))
    assert max(vector.size for vector in vectors) <= each * max(map(jnp.size, parameters))
    assert len(vectors) <= 25


def of_masked(layer, x):
    _, state = make(SHAPE[1], "batch", approach="batch")

    def one(x, mask):
        return layer(x, state, mask=mask)[0]

    return jax.vmap(one, axis_name="batch")(x, jnp.ones((SHAPE[0], *SHAPE[2:]), bool))


SILU, CALL = batch_norm(jax.nn.silu)
OTHERS = {
    **{approach: batch_norm(jax.nn.silu, approach) for approach in APPROACHES},
    "compiled before": (SILU, jax.jit(CALL)),
    "with a mask, as booleans": (SILU, of_masked),
}


@each_dtype
@pytest.mark.parametrize(("layer", "call"), OTHERS.values(), ids=OTHERS)
def test_nothing_else_of_its_size(layer, call, dtype):
    x = normal(0, SHAPE).astype(dtype)
    kept = [leaf for leaf in held(layer, call, x) if leaf.size > 2 * SHAPE[1]]  # a pair
    assert [(k.shape, k.dtype) for k in kept if k.dtype != bool] == [(SHAPE, dtype)]
    assert all(k.size < x.size for k in kept if k.dtype == bool)


@pytest.mark.x32  # Equinox's layer promotes
def test_more_is_found_where_there_is_more():
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(SHAPE[1], "batch", mode="batch")

    def then_relu(layer, x):
        return jax.nn.relu(over_batch(layer)(x, state)[0])

    x = normal(0, SHAPE)
    assert sum(leaf.size >= x.size for leaf in held(layer, then_relu, x)) > 1


# --- In networks: x is kept once, in its own shape, and shared with a neighbour that keeps it.


def stacked(f, *operands):
    """Returns shape and dtype of what the scan in `grad(f)` keeps for each layer, if large."""

    def loss(*operands):
        return jnp.sum(f(*operands).astype(jnp.float32))

    closed = jax.make_jaxpr(jax.grad(loss, tuple(range(len(operands)))))(*operands)
    scans = (e for e in jaxprs.equations(closed.jaxpr) if e.primitive.name == "scan")
    kept = [var.aval for var in next(scans).outvars if var.aval.shape[:1] == (DEPTH,)]
    return [(a.shape[1:], a.dtype) for a in kept if a.size >= DEPTH * math.prod(SHAPE)]


def conv(x, weight):
    return jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME")


# The activation in the layer, a block, and how many arrays like x and of booleans it keeps.
BLOCKS = {
    # The inputs of conv, of norm with its activation and of conv, and nothing else.
    "relu": (jax.nn.relu, lambda f, x, w: conv(f(conv(x, w[0])), w[1]), 3, 0),
    "prelu": (ACTIVATIONS["prelu"], lambda f, x, w: conv(f(conv(x, w[0])), w[1]), 3, 0),
    # And what the ReLU keeps: where it was positive.
    "relu after": (None, lambda f, x, w: conv(jax.nn.relu(f(conv(x, w[0]))), w[1]), 3, 1),
    # Which keeps the same x.
    "neighbour": (jax.nn.silu, lambda f, x, w: conv(x, w[0]) + f(x), 1, 0),
}


@each_norm
@each_dtype
@pytest.mark.parametrize(
    ("activation", "block", "like_x", "bools"), BLOCKS.values(), ids=BLOCKS
)
def test_scanned_over_depth(norm, dtype, activation, block, like_x, bools):
    layer, call = norm(activation)
    weights = normal(1, (DEPTH, 2, SHAPE[1], SHAPE[1], 3, 3)).astype(dtype)

    def network(x, weights):
        def step(x, w):
            return block(lambda x: call(layer, x), x, w), None

        return jax.lax.scan(step, x, weights)[0]

    kept = stacked(network, normal(0, SHAPE).astype(dtype), weights)
    assert sorted(kept, key=str) == sorted(
        [(SHAPE, dtype)] * like_x + [(SHAPE, bool)] * bools, key=str
    )


def dropped(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), x, 0)


PRELU = ACTIVATIONS["prelu"]
# With the policy: the inputs of the first convolution and of the norm, whatever stands between.
RECOMPUTED = {
    "relu": (jax.nn.relu, lambda f, x, w: conv(f(conv(x, w[0])), w[1]), 2),
    "relu after": (None, lambda f, x, w: conv(jax.nn.relu(f(conv(x, w[0]))), w[1]), 2),
    "gelu after": (None, lambda f, x, w: conv(jax.nn.gelu(f(conv(x, w[0]))), w[1]), 2),
    "prelu after": (None, lambda f, x, w: conv(PRELU(f(conv(x, w[0]))), w[1]), 2),
    "dropout after": (None, lambda f, x, w: conv(dropped(f(conv(x, w[0]))), w[1]), 2),
    "residual": (None, lambda f, x, w: conv(jax.nn.relu(x + f(conv(x, w[0]))), w[1]), 2),
    "prelu": (PRELU, lambda f, x, w: conv(f(conv(x, w[0])), w[1]), 2),
}


@each_norm
@each_dtype
@pytest.mark.parametrize(("activation", "block", "like_x"), RECOMPUTED.values(), ids=RECOMPUTED)
def test_recompute_outputs(norm, dtype, activation, block, like_x):
    layer, call = norm(activation)
    weights = normal(1, (DEPTH, 2, SHAPE[1], SHAPE[1], 3, 3)).astype(dtype)

    def network(x, weights):
        @functools.partial(jax.checkpoint, policy=recompute_outputs)
        def step(x, w):
            return block(lambda x: call(layer, x), x, w), None

        return jax.lax.scan(step, x, weights)[0]

    kept = stacked(network, normal(0, SHAPE).astype(dtype), weights)
    assert kept == [(SHAPE, dtype)] * like_x


@pytest.fixture
def remat3():
    """Turns on what is to become JAX's default."""
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", False)


def product(x, weight):
    return jnp.einsum("nchw,dc->ndhw", x, weight[..., 0, 0])


@each_norm
@pytest.mark.long
@pytest.mark.parametrize("linear", [conv, product])
def test_recompute_outputs_with_remat3(norm, linear, remat3):
    """JAX asks for matrix products at most, and computes all else again."""
    layer, call = norm(jax.nn.relu)
    x, weights = normal(0, SHAPE), normal(1, (DEPTH, 2, SHAPE[1], SHAPE[1], 3, 3), std=0.3)

    def network(x, weights, wrap):
        @wrap
        def step(x, w):
            return linear(call(layer, linear(x, w[0])), w[1]), None

        return jax.lax.scan(step, x, weights)[0]

    kept_by = functools.partial(jax.checkpoint, policy=recompute_outputs)
    kept = stacked(functools.partial(network, wrap=kept_by), x, weights)
    assert len(kept) in (1, 2)
    ours, right = (
        jax.grad(lambda w, wrap=wrap: network(x, w, wrap).sum())(weights)
        for wrap in (kept_by, lambda step: step)
    )
    np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-4 * float(jnp.abs(right).max()))
