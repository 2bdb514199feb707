"""Tests which program is compiled for a CUDA device, on a machine that has none.

That the kernels compute the right thing, test_backends.py holds.
"""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eqx_norm import BatchNorm, LayerNorm
from tests.helpers import copy, over_batch

from .gpus import HAS_MOSAIC, mesh, needs_mosaic

FORWARD, BACKWARD = "eqx_norm_statistics", "eqx_norm_vjp_sums"
ROWS, ROWS_VJP = "eqx_norm_rows", "eqx_norm_rows_vjp"
# 8 MiB of float32, and 4 values.
DENSE, SMALL = (2048, 1024), (2, 2)


def lowered(f, *shaped, on=None):
    """Returns the text of what XLA would be given."""
    with jax.sharding.use_abstract_mesh(on or mesh()):
        return jax.jit(f).trace(*shaped).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text):
    """Returns the kernels in it, but for those that merge the results of others."""
    if "__gpu$xla.gpu.triton" not in text:
        return set()
    names = (FORWARD, BACKWARD, ROWS, ROWS_VJP)
    return {name for name in names if re.search(rf"\b{name}\b", text)}


def forward(shape, dtype=jnp.float32, axis_name: Any = "batch", **arguments):
    """Returns a whole layer, and its x."""

    def f(x):
        make = eqx.nn.make_with_state(BatchNorm)
        layer, state = make(shape[1], axis_name, approach="batch", **arguments)
        return over_batch(layer)(x, state)

    return f, jax.ShapeDtypeStruct(shape, dtype)


def both(shape, dtype=jnp.float32, **arguments):
    f, x = forward(shape, dtype, **arguments)

    def g(x, dy):
        y, pull_back, state = jax.vjp(f, x, has_aux=True)
        return y, pull_back(dy), state

    return g, x, x


def layer_norm(*shape, dtype=jnp.float32, **arguments):
    """Returns a LayerNorm's forward and backward pass, and its arguments."""
    layer = LayerNorm(shape[-1], **arguments)

    def f(x, dy, layer=layer):
        y, pull_back = jax.vjp(lambda layer, x: jax.vmap(layer)(x), layer, x)
        return y, pull_back(dy)

    x = jax.ShapeDtypeStruct(shape, dtype)
    return f, x, x


def masked():
    layer, state = eqx.nn.make_with_state(BatchNorm)(1024, "batch", approach="batch")

    def f(x, mask):
        one = lambda x, mask: layer(x, copy(state), mask=mask)  # noqa: E731
        return jax.vmap(one, axis_name="batch", out_axes=(0, None))(x, mask)

    return f, jax.ShapeDtypeStruct(DENSE, jnp.float32), jax.ShapeDtypeStruct(DENSE[:1], bool)


def stacked(*shaped):
    return [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shaped]


def ensemble(f, *shaped):
    return jax.vmap(f), *stacked(*shaped)


def scanned(f, *shaped):
    return lambda *arrays: jax.lax.scan(lambda c, _: (c, f(*c)), arrays, length=2)[1], *shaped


def remat(f, *shaped):
    return jax.checkpoint(f), *shaped


def penalty(f, x):
    def of_gradient(x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(jax.tree.leaves(f(x))[0] ** 2))(x) ** 2)

    return jax.grad(of_gradient), x


def jvp(f, x):
    return lambda x, dx: jax.jvp(f, (x,), (dx,)), x, x


def rows(**arguments):
    """Returns a LayerNorm, forward alone, and its x."""
    return jax.vmap(LayerNorm(768, **arguments)), jax.ShapeDtypeStruct((2048, 768), jnp.float32)


def weights_of_members():
    """Returns an ensemble with weights of its own for each member."""
    f, x, dy = layer_norm(2048, 768)
    layer = jax.tree.map(lambda v: jnp.stack([v] * 3), LayerNorm(768))
    return jax.vmap(f), *stacked(x, dy), layer


RELU, SILU, PRELU = jax.nn.relu, jax.nn.silu, eqx.nn.PReLU(0.25)
TRITON, MOSAIC = "pallas_triton", "pallas_mosaic"
IMAGES = (64, 64, 32, 32)
EACH_WAY, ROWS_EACH_WAY = {FORWARD, BACKWARD}, {ROWS, ROWS_VJP}
CASES = {
    # Images of float32 may lie channel after channel.
    "images, float32": (lambda: both(IMAGES, activation=RELU), set()),
    "images, bfloat16": (lambda: both(IMAGES, jnp.bfloat16, activation=RELU), EACH_WAY),
    "images, float16": (lambda: both(IMAGES, jnp.float16, activation=RELU), EACH_WAY),
    "float32": (lambda: both(DENSE, activation=RELU), EACH_WAY),
    "bfloat16": (lambda: both(DENSE, jnp.bfloat16), EACH_WAY),
    "float16": (lambda: both(DENSE, jnp.float16), EACH_WAY),
    "no activation": (lambda: both(DENSE), EACH_WAY),
    "gelu": (lambda: both(DENSE, activation=jax.nn.gelu), EACH_WAY),
    # XLA can fuse the derivative of what has arrays of its own into its sums.
    "prelu": (lambda: both(DENSE, activation=PRELU), {FORWARD}),
    "a mask": (masked, {FORWARD}),
    "xla": (lambda: both(DENSE, implementation="xla"), set()),
    "inference": (lambda: forward(DENSE, inference=True), set()),
    "small": (lambda: both(SMALL), set()),
    "small, asked for": (lambda: both(SMALL, implementation=TRITON), EACH_WAY),
    "images, asked for": (lambda: both(IMAGES, implementation=TRITON), EACH_WAY),
    "ensemble": (lambda: ensemble(*both(DENSE, activation=RELU)), EACH_WAY),
    "scan": (lambda: scanned(*both(DENSE, activation=RELU)), EACH_WAY),
    "remat": (lambda: remat(*both(DENSE, activation=RELU)), EACH_WAY),
    "second order": (lambda: penalty(*forward(DENSE, activation=SILU)), EACH_WAY),
    "forward mode": (lambda: jvp(*forward(DENSE, activation=SILU)), {FORWARD}),
    "rows": (lambda: layer_norm(4096, 768, activation=jax.nn.gelu), ROWS_EACH_WAY),
    "rows, bfloat16": (lambda: layer_norm(4096, 768, dtype=jnp.bfloat16), ROWS_EACH_WAY),
    "rows, float16": (lambda: layer_norm(4096, 768, dtype=jnp.float16), ROWS_EACH_WAY),
    "rows, xla": (lambda: layer_norm(4096, 768, implementation="xla"), set()),
    "rows, plain": (
        lambda: layer_norm(4096, 768, use_weight=False, use_bias=False),
        ROWS_EACH_WAY,
    ),
    "rows, weight": (lambda: layer_norm(4096, 768, use_bias=False), ROWS_EACH_WAY),
    # What has arrays of its own is composed of the passes.
    "rows, prelu": (lambda: layer_norm(4096, 768, activation=PRELU), {FORWARD}),
    "rows that no program holds": (lambda: layer_norm(64, 20000), {FORWARD}),
    "few rows": (lambda: layer_norm(64, 64), set()),
    "few rows, asked for": (
        lambda: layer_norm(64, 64, implementation=TRITON),
        ROWS_EACH_WAY,
    ),
    "rows, scan": (lambda: scanned(*layer_norm(2048, 768, activation=SILU)), ROWS_EACH_WAY),
    "rows, remat": (lambda: remat(*layer_norm(2048, 768, activation=SILU)), ROWS_EACH_WAY),
    "rows, second order": (lambda: penalty(*rows(activation=SILU)), ROWS_EACH_WAY),
    "rows, forward mode": (lambda: jvp(*rows(activation=SILU)), {ROWS}),
    "rows, weights of members": (weights_of_members, {FORWARD}),
}


@pytest.mark.parametrize(("program", "found"), CASES.values(), ids=CASES)
def test_which_kernels_are_taken(program, found):
    assert kernels(lowered(*program())) == found


def test_exported():
    """`jax.export` refuses custom calls that it cannot promise to keep."""
    f, x = forward(DENSE)
    exported = jax.export.export(jax.jit(lambda x: f(x)[0]), platforms=("cuda", "cpu"))(x)
    assert kernels(str(exported.mlir_module())) == set()


@pytest.mark.parametrize("program", [both, lambda shape, **how: layer_norm(*shape, **how)])
def test_a_kernel_is_for_cuda(program):
    f, *shaped = program((64, 64), implementation=TRITON)
    with pytest.raises(ValueError, match="implementation='pallas_triton' is for CUDA devices"):
        jax.jit(f).lower(*shaped)


def test_a_dtype_that_no_kernel_takes():
    with jax.enable_x64(True):
        assert kernels(lowered(*both(DENSE, jnp.float64))) == set()
        with pytest.raises(ValueError, match=r"cannot serve x of shape .*float64.*'auto'"):
            lowered(*both(DENSE, jnp.float64, implementation=TRITON))


@needs_mosaic
def test_mosaic_if_asked_for():
    text = lowered(*both((8192, 1024), jnp.bfloat16, implementation=MOSAIC))
    assert text.count("mosaic_gpu") >= 2
    assert "xla.gpu.triton" not in text


TOO_OLD = r"the Mosaic kernels take jax 0\.12, and this is jax"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda **how: both((8192, 100), **how), "64 channels of bfloat16, and x has 100"),
        (lambda **how: layer_norm(4096, 768, **how), r"and x has 1\."),
    ],
    ids=["channels", "rows"],
)
def test_what_mosaic_cannot_serve(program, reason):
    reason = reason if HAS_MOSAIC else TOO_OLD
    with pytest.raises(ValueError, match=f"'pallas_mosaic' cannot serve x .*{reason}"):
        lowered(*program(dtype=jnp.bfloat16, implementation=MOSAIC))


@pytest.mark.parametrize("implementation", ["auto", TRITON])
def test_operands_that_jit_has_sharded_are_not_gathered(implementation):
    on, split = mesh(size=2), P("x")
    f, x = forward((4096, 1024), implementation=implementation)
    sharded = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, split))
    if implementation == "auto":
        assert kernels(lowered(f, sharded, on=on)) == set()
    else:
        with pytest.raises(ValueError, match=r"XLA partitions this program.*jax\.shard_map"):
            lowered(f, sharded, on=on)
    f, x = forward((4096, 1024), implementation=implementation, axis_name=("batch", "x"))
    specs = {"in_specs": split, "out_specs": split, "check_vma": False}
    inside = jax.shard_map(lambda x: f(x)[0], mesh=on, **specs)
    assert kernels(lowered(inside, x, on=on)) == {FORWARD}
