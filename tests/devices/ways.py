"""Takes a training step on one device, and in each of the ways to take it over eight."""

import contextlib
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eqx_norm.strategies import Renorm
from tests.helpers import make, y_and_gradients

DEVICES = 8
N, C = 16, 6
SPACE = 3, 2  # two axes, whose values a layer handles as one longer row
SHAPE = C, *SPACE
WHOLE, SPLIT = P(), P("devices")


class Case(NamedTuple):
    approach: Any
    activation: Any
    dtype: Any
    masked: bool


# Every approach, and of activations, dtypes and masks every two.
CASES = {
    "ema, relu": Case("ema", jax.nn.relu, jnp.float32, False),
    "batch, silu, bf16, mask": Case("batch", jax.nn.silu, jnp.bfloat16, True),
    "adam, PReLU, mask": Case("adam", eqx.nn.PReLU(0.3), jnp.float32, True),
    "smooth_start, PReLU, bf16": Case("smooth_start", eqx.nn.PReLU(0.3), jnp.bfloat16, False),
    "variance_clip, silu": Case("variance_clip", jax.nn.silu, jnp.float32, False),
    "renorm, relu, mask": Case(Renorm(r_max=3.0, d_max=5.0), jax.nn.relu, jnp.float32, True),
}


def arguments(case: Case) -> tuple[jax.Array, ...]:
    """Returns x, the cotangent of y, and the mask; of the examples of one device none count."""
    random = np.random.default_rng(0)
    x, dy = random.standard_normal((2, N, *SHAPE))
    mask = np.ones((N, *SPACE), bool)
    if case.masked:
        mask = random.uniform(size=mask.shape) < random.uniform(0.2, 1.2, (N, 1, 1))
        mask[6:8] = False
    return jnp.asarray(5 + 2 * x, case.dtype), jnp.asarray(dy, case.dtype), jnp.asarray(mask)


def forward(model: Any, state: Any, x: Any, mask: Any = None) -> Any:
    return jax.vmap(
        lambda x, mask, state: model(x, state, mask=mask),
        axis_name="batch",
        in_axes=(0, 0, None),
        out_axes=(0, None),
    )(x, mask, state)


def step_of(forward: Any, summed_over: Any = ()) -> Callable[..., Any]:
    """Returns `step(model, state, x, dy, mask)`, which gives outputs, memory and gradients."""

    def step(model: Any, state: Any, x: Any, dy: Any, mask: Any = None) -> Any:
        def f(model: Any, x: Any) -> Any:
            return forward(model, state, x, mask)

        y, state, dmodel, dx = y_and_gradients(f, dy, model, x, has_aux=True)
        return y, state, jax.lax.psum(dmodel, summed_over), dx

    return step


# --- The ways: names to take the statistics over, what to compile, and where x is to be.


class Way(NamedTuple):
    forward: Callable[..., Any]
    step: Callable[..., Any]
    names: Any = ("batch", "devices")
    # Arrays as the programs take them, split over devices or whole, and outputs as those of one
    # device.
    placed: Callable[[P, Any], Any] = lambda spec, tree: tree
    joined: Callable[[Any], Any] = lambda outputs: outputs
    mesh: Any = None  # one that is set while the programs are made and called


def mesh_of(kind: AxisType = AxisType.Auto, **axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def placed(mesh: Any, spec: P, tree: Any) -> Any:
    arrays, static = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, NamedSharding(mesh, spec)), static)


def of_arrays(f: Any, mapped: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f(model, state, *arrays)`, whose model has only arrays for `mapped`."""

    def call(model: Any, state: Any, *arrays: Any) -> Any:
        parameters, static = eqx.partition(model, eqx.is_array)

        def g(parameters: Any, state: Any, arrays: Any) -> Any:
            return f(eqx.combine(parameters, static), state, *arrays)

        return mapped(g)(parameters, state, arrays)

    return call


def over_mesh(
    f: Any, outputs: Any, mesh: Any, split: P = SPLIT, check_vma: bool = True
) -> Callable[..., Any]:
    """Returns `f(model, state, *arrays)`, which each device calls with its examples."""
    specs: Any = {"in_specs": (WHOLE, WHOLE, split), "out_specs": outputs}
    return of_arrays(
        f, functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma, **specs)
    )


def shard_map(check_vma: bool, inside: bool = False, devices: int = DEVICES) -> Way:
    """Returns the derivatives of a `shard_map`, or a `shard_map` of derivatives. If this does
    not check what varies over the mesh, gradients of what does not are to be summed by hand."""
    options: Any = {"mesh": mesh_of(devices=devices), "check_vma": check_vma}
    f = over_mesh(forward, (SPLIT, WHOLE), **options)
    if not inside:
        return Way(f, step_of(f))
    step = step_of(forward, () if check_vma else "devices")
    return Way(f, over_mesh(step, (SPLIT, WHOLE, WHOLE, SPLIT), **options))


def pmap() -> Way:
    mapped = functools.partial(jax.pmap, axis_name="devices", in_axes=(None, None, 0))

    def split(spec: P, tree: Any) -> Any:
        return tree if spec == WHOLE else tree.reshape(DEVICES, -1, *tree.shape[1:])

    def joined(outputs: Any) -> Any:
        y, *others, dx = outputs
        others = jax.tree.map(lambda leaf: leaf[0], others)
        return y.reshape(N, *SHAPE), *others, dx.reshape(N, *SHAPE)

    step = of_arrays(step_of(forward, "devices"), mapped)
    return Way(of_arrays(forward, mapped), step, placed=split, joined=joined)


def automatic(kind: AxisType) -> Way:
    """Returns what `jit` makes of arrays that lie on several devices."""
    mesh = mesh_of(kind, devices=DEVICES)
    how: Any = {"placed": functools.partial(placed, mesh), "mesh": mesh}
    return Way(forward, step_of(forward), "batch", **how)


def filter_shard() -> Way:
    """Returns Equinox's own way, of its example of data parallelism."""
    mesh = mesh_of(devices=DEVICES)
    whole, split = NamedSharding(mesh, WHOLE), NamedSharding(mesh, SPLIT)

    def step(model: Any, state: Any, *arrays: Any) -> Any:
        model, state = eqx.filter_shard((model, state), whole)
        y, *others, dx = step_of(forward)(model, state, *eqx.filter_shard(arrays, split))
        return y, *eqx.filter_shard(others, whole), dx

    return Way(forward, step, "batch", placed=functools.partial(placed, mesh))


WAYS: dict[str, Callable[[], Way]] = {
    "shard_map": lambda: shard_map(check_vma=True),
    "shard_map, inside": lambda: shard_map(check_vma=True, inside=True),
    "shard_map, unchecked": lambda: shard_map(check_vma=False),
    "shard_map, unchecked, inside": lambda: shard_map(check_vma=False, inside=True),
    "one device": lambda: shard_map(check_vma=True, devices=1),
    "pmap": pmap,
    "jit": lambda: automatic(AxisType.Auto),
    "explicit axes": lambda: automatic(AxisType.Explicit),
    "filter_shard": filter_shard,
}


def take_step(case: Case, way: Way) -> Any:
    """Returns the outputs of a step in this way, what its program sends, and what that of the
    forward pass sends."""
    options = {"approach": case.approach, "activation": case.activation}
    model = way.placed(WHOLE, make(C, way.names, **options))
    x, dy, mask = (way.placed(SPLIT, array) for array in arguments(case))
    mask = mask if case.masked else None
    with jax.set_mesh(way.mesh) if way.mesh else contextlib.nullcontext():
        outputs, sent = run(way.step, *model, x, dy, mask)
        _, sent_forward = run(way.forward, *model, x, mask)
    return way.joined(outputs), sent, sent_forward


# --- What a program sends, and what comes out of it.


def run(f: Any, *arguments: Any, **options: Any) -> tuple[Any, list[tuple[str, int]]]:
    """Returns the outputs of a function, and what its compiled program sends."""
    jitted: Any = eqx.filter_jit(f, **options)
    compiled = jitted.lower(*arguments).compile()
    return compiled(*arguments), collectives(compiled.compiled)


def collectives(compiled: Any) -> list[tuple[str, int]]:
    """Returns the collectives of a program, and how many elements each device gets by them."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    collectives = []
    for result, name in re.findall(rf"= (.*?) ({names})(?:-start)?\(", compiled.as_text()):
        shapes = re.findall(r"[a-z]+\d+\[([\d,]*)\]", result)
        sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
        collectives.append((name, sum(sizes)))
    return collectives


def error(outputs: Any, expected: Any) -> float:
    """Returns the largest error of any leaf, relative to its largest value or to 1."""
    leaves = map(jax.tree.leaves, (outputs, expected))
    pairs = (
        map(np.float64, pair) for pair in zip(*leaves, strict=True) if pair[1].dtype != int
    )
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1)) for a, b in pairs)
