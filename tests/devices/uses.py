"""Uses layers over eight devices as users do, each use compared with one device.

`python -m tests.devices.uses` is a program of its own, because the number of CPU devices is
fixed when JAX starts. It prints, as JSON, for each use what the test is to judge.
"""

import functools
import json
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eqx_norm import LayerNorm
from tests.helpers import make, over_batch

from .ways import DEVICES, SPLIT, WHOLE, C, Case, L, arguments, collectives, error, forward

CASE = Case("batch", jax.nn.relu, jnp.float32, masked=False)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def call(layer: Any, state: Any, x: Any) -> Any:
    return forward(layer, state, x, None)


def alone(x: Any) -> Any:
    """Returns what one device computes of x as a whole."""
    layer, state = make(C, "batch", approach=CASE.approach)
    return jax.jit(functools.partial(call, layer))(state, x)


def of_groups(axis_name: Any, mesh: jax.sharding.Mesh, groups: str) -> dict[str, float]:
    """Returns the errors where devices that share a place along `groups` share statistics; the
    memory, which differs from group to group, gets an axis of groups."""
    x, *_ = arguments(CASE)
    layer, state = make(C, axis_name, approach=CASE.approach)

    count = mesh.shape[groups]
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * count), state)

    def local(states: Any, x: Any) -> Any:
        y, state = call(layer, jax.tree.map(lambda leaf: leaf[0], states), x)
        return y, jax.tree.map(lambda leaf: leaf[None], state)

    both = P(mesh.axis_names)
    f = jax.shard_map(local, mesh=mesh, in_specs=(P(groups), both), out_specs=(both, P(groups)))
    y, states = jax.jit(f)(states, x)
    right = [alone(part) for part in jnp.split(x, count)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[state for _, state in right])
    return {
        "y": error(y, jnp.concatenate([y for y, _ in right])),
        "memory": error(states, stacked),
    }


def groups() -> dict[str, float]:
    """Returns the errors of groups of two, four times (PyTorch's `process_group`)."""
    return of_groups(("batch", "members"), mesh_of(groups=4, members=2), "groups")


def each_its_own() -> dict[str, float]:
    """Returns the errors where each device has statistics of its own (ghost batches)."""
    return of_groups("batch", mesh_of(devices=DEVICES), "devices")


def its_own_of_one_state() -> str:
    """Returns what is said where each device has its own statistics, and all one state."""
    layer, state = make(C, "batch", approach=CASE.approach)
    f = jax.shard_map(
        functools.partial(call, layer),
        mesh=mesh_of(devices=DEVICES),
        in_specs=(WHOLE, SPLIT),
        out_specs=(SPLIT, WHOLE),
    )
    try:
        f(state, arguments(CASE)[0])
    except ValueError as error:
        return str(error)
    return ""


def micro_batches() -> dict[str, float]:
    """Returns the errors of a `jax.lax.scan` over micro-batches, inside `shard_map`."""
    x = jnp.stack([arguments(CASE)[0] + i for i in range(3)])

    def scanned(layer: Any, state: Any, x: Any) -> Any:
        def body(state: Any, x: Any) -> Any:
            y, state = call(layer, state, x)
            return state, y

        return jax.lax.scan(body, state, x)

    one, state = make(C, "batch", approach=CASE.approach)
    layer, _ = make(C, ("batch", "devices"), approach=CASE.approach)
    along = P(None, "devices")
    split = jax.shard_map(
        functools.partial(scanned, layer),
        mesh=mesh_of(devices=DEVICES),
        in_specs=(WHOLE, along),
        out_specs=(WHOLE, along),
    )
    right = jax.jit(functools.partial(scanned, one))(state, x)
    return {"all": error(jax.jit(split)(state, x), right)}


def sharded_parameters() -> dict[str, Any]:
    """Returns the error, and what is sent, where parameters and memory are split over the
    devices, too, along their channels (FSDP), and the state is donated."""
    x, dy, _ = arguments(CASE)
    x, dy = (jnp.tile(array, (1, 4, 1))[:, : 2 * DEVICES] for array in (x, dy))
    mesh = mesh_of(devices=DEVICES)
    layer, state = make(2 * DEVICES, "batch", approach=CASE.approach)

    def loss(learnt: Any, state: Any, x: Any, dy: Any) -> Any:
        y, state = call(eqx.combine(learnt, rest), state, x)
        return (y * dy).sum(), state

    learnt, rest = eqx.partition(layer, eqx.is_inexact_array)
    step = jax.jit(jax.grad(loss, has_aux=True), donate_argnums=1)

    def placed(tree: Any, spec: P) -> Any:
        return jax.device_put(tree, NamedSharding(mesh, spec))

    def of_channels(leaf: Any) -> Any:
        return placed(leaf, SPLIT if leaf.shape == (2 * DEVICES,) else WHOLE)

    split = jax.tree.map(of_channels, (learnt, jax.tree.map(jnp.copy, state)))
    arrays = (*split, placed(x, SPLIT), placed(dy, SPLIT))
    sent = collectives(step.lower(*arrays).compile())
    right = step(learnt, state, x, dy)
    ours = step(*arrays)
    used_up = all(leaf.is_deleted() for leaf in jax.tree.leaves(arrays[1]))
    return {"all": error(ours, right), "sent": sent, "used up": used_up}


def layer_norm() -> dict[str, Any]:
    """Returns what LayerNorm sends, forward and with gradients, by `jit` and in `shard_map`."""
    layer, mesh = LayerNorm(L), mesh_of(devices=DEVICES)
    x = arguments(CASE)[0][:, 0]

    def f(layer: Any, x: Any) -> Any:
        return jax.vmap(layer)(x)

    def gradient(layer: Any, x: Any) -> Any:
        return jax.grad(lambda layer, x: (f(layer, x) ** 3).sum(), (0, 1))(layer, x)

    report: dict[str, Any] = {}
    for name, function, outputs in (
        ("forward", f, SPLIT),
        ("gradient", gradient, (WHOLE, SPLIT)),
    ):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=outputs)
        placed = jax.device_put(x, NamedSharding(mesh, SPLIT))
        right = function(layer, x)
        for way, g, given in (("shard_map", mapped, x), ("jit", function, placed)):
            compiled = jax.jit(g).lower(layer, given).compile()
            report[f"{name}, {way}"] = {
                "error": error(compiled(layer, given), right),
                "sent": collectives(compiled),
            }
    return report


def equinox() -> dict[str, int]:
    """Returns how many collectives a step by `jit` takes, of this layer and of Equinox's."""
    x, dy, _ = arguments(CASE)
    placed = NamedSharding(mesh_of(devices=DEVICES), SPLIT)
    theirs = eqx.nn.make_with_state(eqx.nn.BatchNorm)(C, "batch", mode="batch")
    counts = {}
    for name, (layer, state) in {
        "ours": make(C, "batch", approach="batch"),
        "equinox": theirs,
    }.items():

        def step(state: Any, x: Any, dy: Any, layer: Any = layer) -> Any:
            y, pull_back, state = jax.vjp(
                lambda x: over_batch(layer)(x, state), x, has_aux=True
            )
            return y, pull_back(dy), state

        arrays = state, *(jax.device_put(array, placed) for array in (x, dy))
        counts[name] = len(collectives(jax.jit(step).lower(*arrays).compile()))
    return counts


USES = {
    use.__name__: use
    for use in (
        groups,
        each_its_own,
        its_own_of_one_state,
        micro_batches,
        sharded_parameters,
        layer_norm,
        equinox,
    )
}


def main() -> None:
    chosen = sys.argv[1:] or USES
    json.dump({name: USES[name]() for name in chosen}, sys.stdout)


if __name__ == "__main__":
    main()
