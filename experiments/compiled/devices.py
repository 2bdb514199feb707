"""Counts what programs for several GPUs send, by `jit` and in `shard_map`."""

import functools
import itertools
import math
import re
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eqx_norm import BatchNorm
from experiments.lab.peers import names

from . import compiler

DEVICE, COUNT = "H200", 8
SHAPE = (64 * COUNT, 64, 28, 28)
JIT, SHARD_MAP = "jit", "shard_map"
_COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


class Sent(NamedTuple):
    """Says what a training step of a layer sends."""

    way: str
    layer: str
    dtype: str
    masked: bool
    collectives: str  # in the order of the program
    sends: int  # how many of them
    largest: int  # numbers that a device gets of one


def compiled() -> list[Sent]:
    """Returns what programs for 8 devices send; call this in a process of its own."""
    mesh = compiler.mesh(DEVICE, COUNT)
    ours = itertools.product((JIT, SHARD_MAP), (names.OURS,), (False, True))
    # It has no mask, and does not run where `shard_map` checks what varies, as by default.
    cases = [*ours, (JIT, names.EQUINOX_BATCH, False)]
    dtypes = (jnp.dtype("float32"), jnp.dtype("bfloat16"))
    return [
        _sent(mesh, way, layer, masked, dtype)
        for dtype in dtypes
        for way, layer, masked in cases
    ]


def _sent(mesh: jax.sharding.Mesh, way: str, layer: str, masked: bool, dtype: Any) -> Sent:
    axis_name = "batch" if way == JIT else ("batch", "devices")
    channels = SHAPE[1]
    if layer == names.OURS:
        make = functools.partial(BatchNorm, approach="batch", activation=jax.nn.relu)
    else:
        make = functools.partial(eqx.nn.BatchNorm, mode="batch", dtype=dtype)
    norm, state = eqx.filter_eval_shape(eqx.nn.make_with_state(make), channels, axis_name)
    arrays, static = eqx.partition(norm, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def forward(arrays: Any, state: Any, x: Any, mask: Any) -> Any:
        def one(x: Any, mask: Any, state: Any) -> Any:
            norm = eqx.combine(arrays, static)
            return norm(x, state) if mask is None else norm(x, state, mask=mask)

        axes = {"in_axes": (0, 0, None), "out_axes": (0, None)}
        return jax.vmap(one, axis_name="batch", **axes)(x, mask, state)

    if way == SHARD_MAP:
        split, whole = P("devices"), P()
        specs = {"in_specs": (whole, whole, split, split), "out_specs": (split, whole)}
        forward = jax.shard_map(forward, mesh=mesh, **specs)

    def step(arrays: Any, state: Any, x: Any, mask: Any, dy: Any) -> Any:
        y, pull_back, state = jax.vjp(
            lambda arrays, x: forward(arrays, state, x, mask), arrays, x, has_aux=True
        )
        return y, pull_back(dy), state

    def over(spec: P, tree: Any) -> Any:
        placed = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, spec))
        return jax.tree.map(lambda leaf: placed(leaf.shape, leaf.dtype), tree)

    x = over(P("devices"), jax.ShapeDtypeStruct(SHAPE, dtype))
    mask = jax.ShapeDtypeStruct((SHAPE[0], *SHAPE[2:]), jnp.bool_)
    mask = over(P("devices"), mask) if masked else None
    hlo = compiler.compiled(mesh, step, *over(P(), (arrays, state)), x, mask, x)
    found = [
        (name, max(_sizes(result)))
        for result, name in re.findall(rf"= (.*?) ({_COLLECTIVES})(?:-start)?\(", hlo)
    ]
    text = ", ".join(f"{name} {size}" for name, size in found)
    largest = max((size for _, size in found), default=0)
    return Sent(way, layer, dtype.name, masked, text, len(found), largest)


def _sizes(result: str) -> list[int]:
    """Returns the sizes of the arrays in a type, as `(f32[4,64]{1,0}, f32[8,4,64]{2,1,0})`."""
    shapes = re.findall(r"[a-z]+\d*\[([\d,]*)\]", result)
    return [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
