"""Tests layers over eight devices as users use them, by one device.

Run by test_devices.py, in a process with eight devices.
"""

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eqx_norm
from eqx_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from tests.helpers import make, over_batch

from .ways import (
    CASES,
    DEVICES,
    SPLIT,
    WHOLE,
    C,
    Case,
    L,
    arguments,
    collectives,
    error,
    forward,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "devices.md"
CASE = Case("batch", jax.nn.relu, jnp.float32, masked=False)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def over(f: Any, mesh: jax.sharding.Mesh, inputs: Any, outputs: Any) -> Any:
    return jax.shard_map(f, mesh=mesh, in_specs=inputs, out_specs=outputs)


def call(layer: Any, state: Any, x: Any) -> Any:
    return forward(layer, state, x, None)


def test_the_example_in_the_documents():
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    x, *_ = arguments(CASE)
    model, state = make(C, ("batch", "devices"), approach=CASE.approach)
    names: dict[str, Any] = {"model": model, "state": state, "x": x}
    exec(code, names)
    one, _ = make(C, "batch", approach=CASE.approach)
    right = jax.jit(functools.partial(call, one))(state, x)
    assert error((names["y"], names["state"]), right) < 1e-6


@pytest.mark.parametrize(
    ("axis_name", "axes", "groups"),
    [
        (("batch", "members"), {"groups": 4, "members": 2}, "groups"),
        ("batch", {"devices": DEVICES}, "devices"),
    ],
    ids=["groups of two", "each its own"],
)
def test_statistics_are_shared_by_the_devices_that_are_named(axis_name, axes, groups):
    """Tests PyTorch's `process_group`; each group has a state of its own."""
    x, *_ = arguments(CASE)
    layer, state = make(C, axis_name, approach=CASE.approach)
    mesh = mesh_of(**axes)
    count, both = mesh.shape[groups], P(mesh.axis_names)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * count), state)

    def local(states, x):
        y, state = call(layer, jax.tree.map(lambda leaf: leaf[0], states), x)
        return y, jax.tree.map(lambda leaf: leaf[None], state)

    f = over(local, mesh, (P(groups), both), (both, P(groups)))
    y, states = jax.jit(f)(states, x)
    one, state = make(C, "batch", approach=CASE.approach)
    right = [jax.jit(functools.partial(call, one))(state, x) for x in jnp.split(x, count)]
    assert error(y, jnp.concatenate([y for y, _ in right])) < 1e-6
    memories = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[state for _, state in right])
    assert error(states, memories) < 1e-6


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("devices", name) for name in CASES),
        ("groups of devices", "batch, silu, bf16, mask"),
        ("groups of devices", "ema, relu"),
        ("devices and ghosts", "renorm, relu, mask"),
        ("devices and ghosts", "variance_clip, silu"),
    ],
)
def test_each_device_normalises_by_its_own_and_all_share_one_memory(kind, name):
    """Forward sends the vectors to be remembered, and backward only gradients of parameters."""
    case = CASES[name]
    x, dy, mask = arguments(case)
    approach, activation = case.approach, case.activation
    sizes = {"groups": 4, "members": 2} if kind == "groups of devices" else {"devices": DEVICES}
    mesh, split = mesh_of(**sizes), P(tuple(sizes))
    names = {"axis_name": ("batch", "members"), "memory_axis_name": "groups"}
    if kind != "groups of devices":
        names = {"axis_name": "batch", "memory_axis_name": ("devices", "ghosts")}
    if kind == "devices":
        names["memory_axis_name"] = "devices"
    layer, state = make(C, approach=approach, activation=activation, **names)
    learnt, rest = eqx.partition(layer, eqx.is_inexact_array)

    def local(learnt, state, x, mask):
        layer = eqx.combine(learnt, rest)
        if kind == "devices and ghosts":  # one example in each of a device's two groups
            axes: Any = {"in_axes": (None, 0, 0), "out_axes": (0, None)}
            one = jax.vmap(lambda s, x, m: forward(layer, s, x, m), axis_name="ghosts", **axes)
            y, state = one(state, x[:, None], mask[:, None])
            return y[:, 0], state
        return forward(layer, state, x, mask)

    f = over(local, mesh, (WHOLE, WHOLE, split, split), (split, WHOLE))

    def step(f, learnt, state, x, dy):
        y, pull_back, state = jax.vjp(
            lambda learnt, x: f(learnt, state, x, mask), learnt, x, has_aux=True
        )
        return y, state, pull_back(dy)

    compiled = jax.jit(functools.partial(step, f)).lower(learnt, state, x, dy).compile()
    y, after, gradients = compiled(learnt, state, x, dy)
    count = {"devices": 8, "groups of devices": 4, "devices and ghosts": 16}[kind]
    one, one_state = make(C, "batch", approach=approach, activation=activation)
    structure, one_rest = eqx.partition(one, eqx.is_inexact_array)

    def in_turn(learnt, state, x, mask):
        learnt = jax.tree.unflatten(jax.tree.structure(structure), jax.tree.leaves(learnt))
        plain = functools.partial(forward, eqx.combine(learnt, one_rest), state)
        parts = (array.reshape(count, -1, *array.shape[1:]) for array in (x, mask))
        y = jax.lax.map(lambda part: plain(*part)[0], tuple(parts))
        return y.reshape(x.shape), plain(x, mask)[1]

    right = jax.jit(functools.partial(step, in_turn))(learnt, one_state, x, dy)
    near = 1e-2 if case.dtype == jnp.bfloat16 else 1e-5
    assert error((y, gradients), (right[0], right[2])) < near
    assert error(after, right[1]) < 1e-6
    forward_only = jax.jit(f).lower(learnt, state, x, mask).compile()
    sent = collectives(forward_only)
    assert all(elements <= 4 * C * DEVICES for _, elements in sent), sent
    if kind != "groups of devices":  # whose members share statistics, and their gradients
        reduced = sum(n for sent, n in collectives(compiled) if sent == "all-reduce")
        assert reduced == sum(leaf.size for leaf in jax.tree.leaves(learnt))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_groups_that_jit_has_split_over_devices(axis_type):
    layer, state = make(C, "ghost", approach="batch", memory_axis_name="group")
    x = arguments(CASE)[0].reshape(DEVICES, -1, C, L)

    def grouped(layer: Any, state: Any, x: Any) -> Any:
        axes: Any = {"axis_name": "group", "in_axes": (0, None), "out_axes": (0, None)}
        return jax.vmap(over_batch(layer, "ghost"), **axes)(x, state)

    f: Any = eqx.filter_jit(grouped)
    right = f(layer, state, x)
    mesh = jax.make_mesh((DEVICES,), ("devices",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        parameters, rest = eqx.partition(layer, eqx.is_array)
        whole = jax.device_put((parameters, state), NamedSharding(mesh, WHOLE))
        given = eqx.combine(whole[0], rest), whole[1], jax.device_put(x, SPLIT)
        compiled = f.lower(*given).compile()
        assert error(jax.device_get(compiled(*given)), right) < 1e-6
    # No more than count, mean, m2 and the rest of the mean of each group.
    assert sum(sent.elements for sent in collectives(compiled.compiled)) <= 4 * C * DEVICES


def test_one_state_for_different_statistics_is_an_error():
    layer, state = make(C, "batch", approach=CASE.approach)
    f = functools.partial(call, layer)
    f = over(f, mesh_of(devices=DEVICES), (WHOLE, SPLIT), (SPLIT, WHOLE))
    said = r"along \('devices',\).* make the layer with axis_name=\('batch', 'devices'\)"
    with pytest.raises(ValueError, match=said):
        f(state, arguments(CASE)[0])


def test_a_scan_over_micro_batches_inside_shard_map():
    x = jnp.stack([arguments(CASE)[0] + i for i in range(3)])

    def scanned(layer: Any, state: Any, x: Any) -> Any:
        def body(state: Any, x: Any) -> Any:
            y, state = call(layer, state, x)
            return state, y

        return jax.lax.scan(body, state, x)

    one, state = make(C, "batch", approach=CASE.approach)
    layer, _ = make(C, ("batch", "devices"), approach=CASE.approach)
    along = P(None, "devices")
    split = functools.partial(scanned, layer)
    split = over(split, mesh_of(devices=DEVICES), (WHOLE, along), (WHOLE, along))
    right = jax.jit(functools.partial(scanned, one))(state, x)
    assert error(jax.jit(split)(state, x), right) < 1e-6


@pytest.mark.parametrize(
    ("layer", "along", "parameters"),
    [
        *(
            (layer, *places)
            for layer in ("BatchNorm", "BatchNorm, bfloat16, PReLU", "LayerNorm")
            for places in (
                (P(("a", "c")), WHOLE),
                *itertools.product([P("a", "c"), P(None, "c")], [WHOLE, P("c")]),
            )
        ),
        ("GroupNorm", P("a", "c"), P("c")),
        ("RMSNorm", P(("a", "c")), WHOLE),
    ],
    ids=str,
)
def test_explicit_axes_along_channels_too(layer, along, parameters):
    x, dy, _ = arguments(CASE)
    alone = {"LayerNorm": ((C, L),), "RMSNorm": ((C, L),), "GroupNorm": (2, C)}
    if layer in alone:
        model = getattr(eqx_norm, layer)(*alone[layer], activation=jax.nn.silu)
        state = None
    else:
        prelu = eqx.nn.PReLU(0.3) if "PReLU" in layer else None
        model, state = make(C, "batch", approach="variance_clip", activation=prelu)
        x, dy = (a.astype("bfloat16" if prelu else "float32") for a in (x, dy))
    learnt, rest = eqx.partition(model, eqx.is_inexact_array)

    def step(learnt: Any, state: Any, x: Any, dy: Any) -> Any:
        def loss(learnt: Any, x: Any) -> Any:
            model = eqx.combine(learnt, rest)
            y, after = (jax.vmap(model)(x), None) if state is None else call(model, state, x)
            return (y * dy).astype("float32").sum(), (y, after)

        return jax.grad(loss, (0, 1), has_aux=True)(learnt, x)

    kinds = (AxisType.Explicit, AxisType.Explicit)
    mesh = jax.make_mesh((4, 2), ("a", "c"), axis_types=kinds)

    def put(tree: Any, spec: P) -> Any:
        def each(leaf: Any) -> Any:
            return jax.device_put(leaf, NamedSharding(mesh, spec if leaf.ndim else WHOLE))

        return jax.tree.map(each, tree)

    right = jax.jit(step)(learnt, state, x, dy)
    with jax.set_mesh(mesh):
        places = parameters, parameters, along, along
        given = list(map(put, (learnt, state, x, dy), places))
        found = jax.jit(step)(*given)
    assert jax.typeof(found[0][1]).sharding.spec == jax.typeof(given[2]).sharding.spec
    assert error(jax.device_get(found), right) < (1e-2 if x.dtype == "bfloat16" else 2e-6)


def test_a_state_from_around_shard_map_is_an_error_that_says_so():
    layer, state = make(C, ("batch", "devices"), approach=CASE.approach)
    f = over(lambda x: call(layer, state, x), mesh_of(devices=DEVICES), SPLIT, (SPLIT, WHOLE))
    said = r"x is on the mesh {'devices': 8}, but the state given is on no mesh.*as an argument"
    with pytest.raises(ValueError, match=said):
        f(arguments(CASE)[0])


def test_parameters_are_split_over_devices_and_a_donated_state_is_used_up():
    """Tests parameters and memory split along their channels, too (FSDP)."""
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
    assert error(ours, right) < 1e-6
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(arrays[1]))
    # Parameters are gathered and sums of gradients spread; x stays where it is.
    assert all(elements <= 3 * 2 * DEVICES for _, elements in sent), sent


@pytest.mark.parametrize("way", ["shard_map", "jit"])
@pytest.mark.parametrize(
    "layer",
    [
        LayerNorm((C, L)),
        LayerNorm((C, L), activation=jax.nn.silu),
        GroupNorm(2, C, activation=jax.nn.silu),
        InstanceNorm(C, affine=True, activation=jax.nn.silu),
        RMSNorm((C, L)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_norms_of_one_example_send_nothing_but_gradients_of_their_parameters(layer, way):
    x, mesh = arguments(CASE)[0], mesh_of(devices=DEVICES)
    learnt, rest = eqx.partition(layer, eqx.is_inexact_array)

    def f(learnt, x):
        return jax.vmap(eqx.combine(learnt, rest))(x)

    def gradient(learnt, x):
        return jax.grad(lambda learnt, x: (f(learnt, x) ** 3).sum(), (0, 1))(learnt, x)

    parameters = sum(leaf.size for leaf in jax.tree.leaves(learnt))
    gradients = [("all-reduce", parameters)]
    for function, outputs, sent in (f, SPLIT, []), (gradient, (WHOLE, SPLIT), gradients):
        mapped = over(function, mesh, (WHOLE, SPLIT), outputs)
        given = jax.device_put(x, NamedSharding(mesh, SPLIT))
        compiled = jax.jit(mapped if way == "shard_map" else function).lower(learnt, given)
        compiled = compiled.compile()
        assert error(compiled(learnt, given), function(learnt, x)) < 1e-6
        assert collectives(compiled) == sent


def test_jit_takes_no_more_collectives_than_equinox_s_layer():
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
    assert counts["ours"] <= counts["equinox"]
