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
from tests.helpers import make

DEVICES = 8
N, C, L = 16, 6, 5
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
    x, dy = random.standard_normal((2, N, C, L))
    mask = np.ones((N, L), bool)
    if case.masked:
        mask = random.uniform(size=mask.shape) < random.uniform(0.2, 1.2, (N, 1))
        mask[6:8] = False
    return jnp.asarray(5 + 2 * x, case.dtype), jnp.asarray(dy, case.dtype), jnp.asarray(mask)


def forward(model: Any, state: Any, x: Any, mask: Any) -> Any:
    return jax.vmap(
        lambda x, mask, state: model(x, state, mask=mask),
        axis_name="batch",
        in_axes=(0, 0, None),
        out_axes=(0, None),
    )(x, mask, state)


def own(gradient: Any) -> Any:
    return gradient


def step_of(forward: Any, total: Any = own) -> Callable[..., Any]:
    """Returns `step(model, state, x, dy, mask)`, which gives outputs, memory and gradients."""

    def step(model: Any, state: Any, x: Any, dy: Any, mask: Any) -> Any:
        learnt, rest = eqx.partition(model, eqx.is_inexact_array)

        def f(learnt: Any, x: Any) -> Any:
            return forward(eqx.combine(learnt, rest), state, x, mask)

        y, pull_back, state = jax.vjp(f, learnt, x, has_aux=True)
        dmodel, dx = pull_back(dy)
        return y, state, total(dmodel), dx

    return step


# --- The ways: names to take the statistics over, what to compile, and where x is to be.


class Way(NamedTuple):
    forward: Callable[..., Any]
    step: Callable[..., Any]
    names: Any = ("batch", "devices")
    # Arrays of examples as the programs take them, and as one device gives them.
    split: Callable[[Any], Any] = lambda arrays: arrays
    joined: Callable[[Any], Any] = lambda results: results
    copied: Callable[[Any], Any] = lambda arrays: arrays  # to all devices
    mesh: Any = None  # one that is set while the programs are made and called


def over_mesh(f: Any, outputs: Any, devices: int, check_vma: bool) -> Callable[..., Any]:
    """Returns `f(model, state, *arrays)`, which each device calls with its examples."""
    mesh = jax.make_mesh((devices,), ("devices",), axis_types=(AxisType.Auto,))

    def call(model: Any, state: Any, *arrays: Any) -> Any:
        parameters, rest = eqx.partition(model, eqx.is_array)
        mapped = jax.shard_map(
            lambda parameters, *others: f(eqx.combine(parameters, rest), *others),
            mesh=mesh,
            in_specs=(WHOLE, WHOLE, *(SPLIT for _ in arrays)),
            out_specs=outputs,
            check_vma=check_vma,
        )
        return mapped(parameters, state, *arrays)

    return call


def outside(check_vma: bool, devices: int = DEVICES) -> Way:
    """Returns the derivatives of a `shard_map`."""
    f = over_mesh(forward, (SPLIT, WHOLE), devices, check_vma)
    return Way(f, step_of(f))


def inside(check_vma: bool) -> Way:
    """Returns a `shard_map` of derivatives. If it does not check what varies over the mesh, the
    gradients of what does not are to be summed by hand."""
    total = own if check_vma else functools.partial(jax.lax.psum, axis_name="devices")
    f = over_mesh(forward, (SPLIT, WHOLE), DEVICES, check_vma)
    outputs = (SPLIT, WHOLE, WHOLE, SPLIT)
    return Way(f, over_mesh(step_of(forward, total), outputs, DEVICES, check_vma))


def pmap() -> Way:
    total = functools.partial(jax.lax.psum, axis_name="devices")

    def mapped(f: Any) -> Callable[..., Any]:
        def call(model: Any, state: Any, *arrays: Any) -> Any:
            parameters, rest = eqx.partition(model, eqx.is_array)

            def of_arrays(parameters: Any, *others: Any) -> Any:
                return f(eqx.combine(parameters, rest), *others)

            axes = (None, None, *(0 for _ in arrays))
            return jax.pmap(of_arrays, "devices", in_axes=axes)(parameters, state, *arrays)

        return call

    def split(array: Any) -> Any:
        return array.reshape(DEVICES, -1, *array.shape[1:])

    def joined(results: Any) -> Any:
        y, state, dmodel, dx = results
        state, dmodel = jax.tree.map(lambda leaf: leaf[0], (state, dmodel))
        return y.reshape(N, C, L), state, dmodel, dx.reshape(N, C, L)

    return Way(mapped(forward), mapped(step_of(forward, total)), split=split, joined=joined)


def automatic(kind: AxisType) -> Way:
    """Returns what `jit` makes of arrays that lie on several devices."""
    mesh = jax.make_mesh((DEVICES,), ("devices",), axis_types=(kind,))

    def placed(spec: P, tree: Any) -> Any:
        arrays, rest = eqx.partition(tree, eqx.is_array)
        return eqx.combine(jax.device_put(arrays, NamedSharding(mesh, spec)), rest)

    whole, split = (functools.partial(placed, spec) for spec in (WHOLE, SPLIT))
    return Way(forward, step_of(forward), "batch", split=split, copied=whole, mesh=mesh)


def filter_shard() -> Way:
    """Returns Equinox's own way, of its example of data parallelism."""
    mesh = jax.make_mesh((DEVICES,), ("devices",), axis_types=(AxisType.Auto,))
    whole, split = NamedSharding(mesh, WHOLE), NamedSharding(mesh, SPLIT)

    def step(model: Any, state: Any, *arrays: Any) -> Any:
        model, state = eqx.filter_shard((model, state), whole)
        arrays = eqx.filter_shard(arrays, split)
        y, state, dmodel, dx = step_of(forward)(model, state, *arrays)
        state, dmodel = eqx.filter_shard((state, dmodel), whole)
        return y, state, dmodel, dx

    return Way(forward, step, "batch", split=functools.partial(jax.device_put, device=split))


WAYS: dict[str, Callable[[], Way]] = {
    "shard_map": functools.partial(outside, check_vma=True),
    "shard_map, inside": functools.partial(inside, check_vma=True),
    "shard_map, unchecked": functools.partial(outside, check_vma=False),
    "shard_map, unchecked, inside": functools.partial(inside, check_vma=False),
    "one device": functools.partial(outside, check_vma=True, devices=1),
    "pmap": pmap,
    "jit": functools.partial(automatic, AxisType.Auto),
    "explicit axes": functools.partial(automatic, AxisType.Explicit),
    "filter_shard": filter_shard,
}

# --- What is found.


class Collective(NamedTuple):
    name: str
    elements: int


def collectives(compiled: Any) -> list[Collective]:
    """Returns what an optimised program sends, and how many elements each device gets."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = []
    for result, name in re.findall(rf"= (.*?) ({names})(?:-start)?\(", compiled.as_text()):
        shapes = re.findall(r"[a-z]+\d+\[([\d,]*)\]", result)
        sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
        found.append(Collective(name, sum(sizes)))
    return found


def error(ours: Any, right: Any) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True)
    differences = (
        (np.abs(np.subtract(a, b, dtype=np.float64)).max(), np.abs(np.float64(b)).max())
        for a, b in pairs
        if jnp.issubdtype(b.dtype, jnp.inexact)
    )
    return max(float(difference / max(size, 1)) for difference, size in differences)


def taken(
    case: Case, way: Way, *, counts_forward: bool = False, **arguments_of_layer: Any
) -> tuple[Any, dict[str, list[Collective]]]:
    """Returns the results of a step, and what its program sends; and that of forward alone."""
    activated = {"approach": case.approach, "activation": case.activation}
    layer, state = make(C, way.names, **activated, **arguments_of_layer)
    x, dy, mask = map(way.split, arguments(case))
    mask = mask if case.masked else None
    layer, state = way.copied((layer, state))
    programs: dict[str, Any] = {"forward": (way.forward, (x, mask))} if counts_forward else {}
    programs["step"] = (way.step, (x, dy, mask))
    sent = {}
    results: Any = None
    with jax.set_mesh(way.mesh) if way.mesh else contextlib.nullcontext():
        for name, (f, arrays) in programs.items():
            jitted: Any = eqx.filter_jit(f)
            compiled = jitted.lower(layer, state, *arrays).compile()
            sent[name] = collectives(compiled.compiled)
            results = compiled(layer, state, *arrays)
    return way.joined(results), sent
