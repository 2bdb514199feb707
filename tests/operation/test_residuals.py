"""Tests that x is kept for the backward pass, in its own dtype, and but vectors beside it.

Read in two ways, which both find more where there is more: eqx.nn.BatchNorm followed by a ReLU.
"""

import contextlib
import io
import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from eqx_norm import LayerNorm
from eqx_norm._normalise import jaxprs
from tests.helpers import APPROACHES, make, normal, over_batch

N, C, L = 8, 3, 40
ACTIVATIONS = {
    "none": None,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "prelu": eqx.nn.PReLU(0.25),
}


def ours(activation=None, approach="batch"):
    layer, state = make(C, "batch", approach=approach, activation=activation)
    return forward(layer, state)


def theirs():
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(C, "batch", mode="batch")
    f = forward(layer, state)
    return lambda vectors, x: jax.nn.relu(f(vectors, x))


def forward(layer, state):
    def f(vectors, x):
        model = eqx.tree_at(lambda m: (m.weight, m.bias), layer, vectors)
        return over_batch(model)(x, state)[0]

    return f


def printed(f, *operands):
    """Returns (dtype, size) of what JAX says it keeps."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print_saved_residuals(f, *operands)
    kept = re.findall(r"^(\w+)\[([\d,]*)\] ", text.getvalue(), re.MULTILINE)
    assert len(kept) == len(text.getvalue().splitlines())
    return [
        (dtype, int(np.prod([int(n) for n in shape.split(",") if n]))) for dtype, shape in kept
    ]


def held(f, *operands):
    """Returns (dtype, size) of what the function of the backward pass holds."""
    _, backward = jax.vjp(f, *operands)
    short = {"float32": "f32", "bfloat16": "bf16"}
    return [
        (short.get(leaf.dtype.name, leaf.dtype.name), leaf.size)
        for leaf in jax.tree.leaves(backward)
    ]


def operands(dtype):
    return (jnp.ones(C), jnp.zeros(C)), normal(0, (N, C, L)).astype(dtype)


def bytes_of(kept):
    size = {"f32": 4, "bf16": 2, "bool": 1}
    return sum(size.get(dtype, 8) * number for dtype, number in kept)


def large(kept):
    return [dtype for dtype, size in kept if size > C]


each_way = pytest.mark.parametrize("read", [printed, held])
each_dtype = pytest.mark.parametrize("dtype", ["f32", "bf16"])
NAMES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


@each_way
@each_dtype
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_x_is_kept_and_vectors(name, dtype, read):
    vectors, x = operands(NAMES[dtype])
    kept = read(ours(ACTIVATIONS[name]), vectors, x)
    assert [(t, size) for t, size in kept if size > C] == [(dtype, x.size)]
    assert bytes_of(kept) <= x.nbytes + 25 * 4 * C


@pytest.mark.parametrize("approach", APPROACHES)
def test_with_every_approach(approach):
    vectors, x = operands(jnp.bfloat16)
    assert large(held(ours(jax.nn.silu, approach), vectors, x)) == ["bf16"]


@each_dtype
def test_compiled_before_it_is_differentiated(dtype):
    vectors, x = operands(NAMES[dtype])
    assert large(held(jax.jit(ours(jax.nn.gelu)), vectors, x)) == [dtype]


def test_in_inference():
    vectors, x = operands(jnp.bfloat16)
    layer, state = make(C, "batch", approach="batch", activation=jax.nn.silu, inference=True)
    assert large(held(forward(layer, state), vectors, x)) == ["bf16"]


def test_a_mask_is_kept_as_booleans():
    layer, state = make(C, "batch", approach="batch", activation=jax.nn.silu)
    vectors, x = operands(jnp.bfloat16)

    def f(vectors, x):
        model = eqx.tree_at(lambda m: (m.weight, m.bias), layer, vectors)
        axes = {"in_axes": (0, 0, None), "out_axes": (0, None)}
        one = jax.vmap(lambda x, m, s: model(x, s, mask=m), axis_name="batch", **axes)
        return one(x, jnp.ones((N, L), bool), state)[0]

    kept = held(f, vectors, x)
    assert [size for dtype, size in kept if size > C and dtype != "bool"] == [x.size]
    assert all(size <= N * L for dtype, size in kept if dtype == "bool")


@pytest.mark.x32  # Equinox's layer promotes
@each_way
def test_more_is_found_where_there_is_more(read):
    vectors, x = operands(jnp.float32)
    kept = read(theirs(), vectors, x)
    assert len(large(kept)) > 1
    assert bytes_of(kept) > 2 * x.nbytes


# --- In networks: x is kept once, in its own shape, and shared with a neighbour that keeps it.

DEPTH, SHAPE = 3, (4, 5, 6, 7)


def stacked(f, *operands):
    """Returns shape and dtype of what the scan in `grad(f)` keeps for each layer, if large."""

    def loss(*operands):
        return jnp.sum(f(*operands).astype(jnp.float32))

    closed = jax.make_jaxpr(jax.grad(loss, tuple(range(len(operands)))))(*operands)
    forward = next(
        equation
        for equation in jaxprs.equations(closed.jaxpr)
        if equation.primitive.name == "scan"
    )
    kept = [var.aval for var in forward.outvars if var.aval.shape[:1] == (DEPTH,)]
    return [(a.shape[1:], a.dtype) for a in kept if a.size >= DEPTH * math.prod(SHAPE)]


def scanned(block):
    """Returns a function of `block(x, weights)`, one after the other."""
    return lambda x, weights: jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)[0]


def conv(x, weight):
    return jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME")


def batch_norm(activation=None, **arguments):
    layer, state = make(SHAPE[1], "batch", approach="batch", activation=activation, **arguments)
    return lambda x: over_batch(layer)(x, state)[0]


def layer_norm(activation=None):
    return jax.vmap(LayerNorm(SHAPE[1:], activation=activation))


NORMS = {"BatchNorm": batch_norm, "LayerNorm": layer_norm}
each_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


def network(dtype):
    """Returns x and the convolutions of each layer."""
    weights = normal(1, (DEPTH, 2, SHAPE[1], SHAPE[1], 3, 3)).astype(dtype)
    return normal(0, SHAPE).astype(dtype), weights


@each_norm
@each_dtype
@pytest.mark.parametrize("activation", [jax.nn.relu, eqx.nn.PReLU(0.25)], ids=["relu", "prelu"])
def test_scanned_over_depth(norm, dtype, activation):
    """Keeps the inputs of conv, of norm with its activation and of conv, and nothing else."""
    f = norm(activation)
    block = scanned(lambda x, w: conv(f(conv(x, w[0])), w[1]))
    assert stacked(block, *network(NAMES[dtype])) == [(SHAPE, NAMES[dtype])] * 3


@each_norm
@each_dtype
def test_scanned_with_a_relu_of_its_own(norm, dtype):
    f = norm()
    block = scanned(lambda x, w: conv(jax.nn.relu(f(conv(x, w[0]))), w[1]))
    kept = stacked(block, *network(NAMES[dtype]))
    # And what the ReLU keeps: where it was positive.
    assert sorted(kept, key=str) == sorted(
        [(SHAPE, NAMES[dtype])] * 3 + [(SHAPE, bool)], key=str
    )


@each_norm
@each_dtype
def test_a_neighbour_that_keeps_x_keeps_the_same(norm, dtype):
    f = norm(jax.nn.silu)
    block = scanned(lambda x, w: conv(x, w[0]) + f(x))
    assert stacked(block, *network(NAMES[dtype])) == [(SHAPE, NAMES[dtype])]


@each_norm
@each_dtype
@pytest.mark.parametrize("activation", [None, eqx.nn.PReLU(0.25)], ids=["none", "prelu"])
def test_without_a_compiled_whole_it_is_x_itself(norm, dtype, activation):
    f, (x, w) = norm(activation), network(NAMES[dtype])
    _, backward = jax.vjp(lambda x: f(x) + conv(x, w[0, 0]), x)
    leaves = [leaf for leaf in jax.tree.leaves(backward) if leaf.size >= x.size]
    assert leaves
    assert all(leaf is x for leaf in leaves)
