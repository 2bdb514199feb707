"""Tests layers over eight devices in each of the ways and as users use them, by one device.

Run by test_devices.py, in processes with 8 devices or more.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eqx_norm import LayerNorm, RMSNorm
from tests import fuzz
from tests.documents import programs_in
from tests.documents import run as run_program
from tests.helpers import make, normal, over_batch, same, y_and_gradients
from tests.layers import test_rows
from tests.layers.norms import (
    NAMES,
    made,
    moved,
    over_examples,
    with_parameters,
)
from tests.processes import ROOT
from tests.strategies.recursions import STRATEGIES

from .ways import (
    CASES,
    DEVICES,
    SHAPE,
    SPLIT,
    WAYS,
    WHOLE,
    C,
    Case,
    N,
    Way,
    arguments,
    error,
    forward,
    mesh_of,
    over_mesh,
    placed,
    run,
    step_of,
    take_step,
)

CASE = Case("batch", jax.nn.relu, jnp.float32, masked=False)
MASKED = "batch, silu, bf16, mask"
# Each case over a mesh, and each way; `make test-long` adds each case by `jit`, and each way
# with a mask.
PAIRS = {(case, "shard_map") for case in CASES} | {("ema, relu", way) for way in WAYS}
LONG_PAIRS = {(case, "jit") for case in CASES} | {(MASKED, way) for way in WAYS}
ROWS = "LayerNorm", "RMSNorm", "GroupNorm"
# What `make test` compiles of all norms and splits.
DRAWN = {("BatchNorm", "values"), ("LayerNorm", "uneven"), ("GroupNorm", "explicit")}


def one_model(name, **options):
    """Returns a layer, its state or `None`, and `f(layer, state, x)` on one device."""
    if name == "BatchNorm":
        return *make(C, "batch", approach="variance_clip", **options), forward
    layer, call = made(name, SHAPE, **options)
    return layer, None, lambda layer, _, x, mask=None: call(layer, x)


def put(tree: Any, mesh: Any, axis_name: str | None, channels: int = C) -> Any:
    """Places the arrays of a tree on a mesh, split along their channels."""

    def placed(leaf: Any) -> Any:
        spec = P(*(axis_name if size == channels else None for size in leaf.shape))
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(lambda leaf: placed(leaf) if eqx.is_array(leaf) else leaf, tree)


@functools.cache
def on_one_device(case):
    return take_step(CASES[case], Way(forward, step_of(forward), "batch"))[0]


@pytest.mark.parametrize(
    ("case", "way"),
    [
        *sorted(PAIRS),
        *(pytest.param(*p, marks=pytest.mark.long) for p in sorted(LONG_PAIRS - PAIRS)),
    ],
)
def test_a_step_equals_that_of_one_device_and_sends_vectors_alone(case, way):
    outputs, sent, sent_forward = take_step(CASES[case], WAYS[way]())
    quantities = zip(
        ("y", "memory", "parameters", "dx"), outputs, on_one_device(case), strict=True
    )
    for quantity, output, expected in quantities:
        assert error(output, expected) < 1e-5, quantity
    # All moments at once, and one sum of gradients.
    assert len(sent_forward) == 1, sent_forward
    assert len(sent) == 2, sent
    assert all(elements <= 4 * DEVICES * C + 1 for _, elements in sent), sent


@pytest.mark.long
def test_examples_in_the_documents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    devices, checkpoints = (
        programs_in((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
        for page in ("devices", "checkpoints")
    )
    for program in [*devices[1:], "\n".join(checkpoints)]:
        run_program(program, tmp_path)
    x, *_ = arguments(CASE)
    model, state = make(C, ("batch", "devices"), approach=CASE.approach)
    names = run_program(devices[0], tmp_path, model=model, state=state, x=x)
    one, _ = make(C, "batch", approach=CASE.approach)
    expected = jax.jit(forward)(one, state, x)
    assert error((names["y"], names["state"]), expected) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("approach", STRATEGIES)
def test_second_derivatives_through_a_strategy_are_those_of_its_formula(approach, unchecked):
    """Tests derivatives in each x of two training steps and an inference, with a mask, over a
    mesh."""
    case = fuzz.Case(
        approach=approach,
        channels=2,
        axes=(("batch", 4),),
        devices="checked",
        weights="own",
        spatial=(3,),
        mask="position",
        activation="gelu",
        steps=("train", "train", "infer"),
        of="vjp of vjp",
        through=True,
    )
    assert not fuzz.run(case)


@pytest.mark.parametrize(
    "seed", [23, 41, 44, 53, 138, 185, 234, pytest.param(385, marks=pytest.mark.long)]
)
def test_random_uses_over_devices_equal_their_formulas(seed):
    """Tests a few cases of tests/fuzz.py, as tests/layers/test_fuzz.py does on one device."""
    case = fuzz.small(fuzz.draw(seed))
    assert case.devices
    assert not case.refused
    problems = fuzz.run(case)
    assert not problems, fuzz.command(case)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("ema, relu", {"devices": DEVICES}),
        pytest.param("renorm, relu, mask", {"devices": DEVICES}, marks=pytest.mark.long),
        pytest.param(MASKED, {"groups": 4, "members": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_each_device_normalises_by_its_own_and_all_share_one_memory(name, axes):
    """Forward sends the vectors to be remembered, and backward only gradients of parameters."""
    case = CASES[name]
    x, dy, mask = arguments(case)
    options: Any = {"approach": case.approach, "activation": case.activation}
    groups, *members = axes
    layer, state = make(C, ("batch", *members), memory_axis_name=groups, **options)
    split = P(tuple(axes))
    f = over_mesh(forward, (split, WHOLE), mesh_of(**axes), split)
    (y, after, *gradients), sent = run(step_of(f), layer, state, x, dy, mask)
    _, sent_forward = run(f, layer, state, x, mask)

    def in_turn(layer, state, x, mask):
        parts = tuple(a.reshape(axes[groups], -1, *a.shape[1:]) for a in (x, mask))
        y = jax.lax.map(lambda part: forward(layer, state, *part)[0], parts)
        return y.reshape(x.shape), forward(layer, state, x, mask)[1]

    one, state = make(C, "batch", **options)
    expected, _ = run(step_of(in_turn), one, state, x, dy, mask)
    tolerance = 1e-2 if case.dtype == jnp.bfloat16 else 1e-5
    assert error((y, gradients), (expected[0], expected[2:])) < tolerance
    assert error(after, expected[1]) < 1e-6
    assert all(elements <= 4 * C * DEVICES for _, elements in sent_forward), sent_forward
    if not members:  # which share statistics, and their gradients
        reduced = sum(n for name, n in sent if name == "all-reduce")
        assert reduced == sum(leaf.size for leaf in jax.tree.leaves(gradients[0]))


def test_one_state_for_different_statistics_is_an_error():
    layer, state = make(C, "batch", approach=CASE.approach)
    f = over_mesh(forward, (SPLIT, WHOLE), mesh_of(devices=DEVICES))
    message = r"along \('devices',\).* make the layer with axis_name=\('batch', 'devices'\)"
    with pytest.raises(ValueError, match=message):
        f(layer, state, arguments(CASE)[0])


def test_a_state_from_around_shard_map_is_an_error_that_says_so():
    layer, state = make(C, ("batch", "devices"), approach=CASE.approach)
    specs: Any = {"in_specs": SPLIT, "out_specs": (SPLIT, WHOLE)}
    mesh = mesh_of(devices=DEVICES)
    f = jax.shard_map(lambda x: forward(layer, state, x), mesh=mesh, **specs)
    message = r"x is on the mesh {'devices': 8}, but the state given is on no mesh.*as an argu"
    with pytest.raises(ValueError, match=message):
        f(arguments(CASE)[0])


def test_a_scan_over_micro_batches_inside_shard_map():
    x = jnp.stack([arguments(CASE)[0] + i for i in range(3)])

    def scanned(layer: Any, state: Any, x: Any) -> Any:
        return jax.lax.scan(lambda state, x: forward(layer, state, x)[::-1], state, x)

    one, state = make(C, "batch", approach=CASE.approach)
    layer, _ = make(C, ("batch", "devices"), approach=CASE.approach)
    split = P(None, "devices")
    over_devices = over_mesh(scanned, (WHOLE, split), mesh_of(devices=DEVICES), split)
    expected = jax.jit(scanned)(one, state, x)
    assert error(jax.jit(over_devices)(layer, state, x), expected) < 1e-6


@pytest.mark.parametrize(
    ("name", "along", "parameters"),
    [
        ("BatchNorm", P("a", "c"), "c"),
        ("LayerNorm", P("a", "c"), "c"),
        pytest.param("BatchNorm", P(("a", "c")), None, marks=pytest.mark.long),
        pytest.param("GroupNorm", P("a", "c"), "c", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_explicit_axes_along_channels_too(name, along, parameters):
    x, dy, _ = arguments(CASE)
    dy = jnp.abs(dy)  # the terms of the slope's gradient do not cancel
    layer, state, f = one_model(name, activation=eqx.nn.PReLU(0.3))
    expected, _ = run(step_of(f), layer, state, x, dy)
    mesh = mesh_of(AxisType.Explicit, a=4, c=2)
    with jax.set_mesh(mesh):
        layer, state = put(layer, mesh, parameters), put(state, mesh, None)
        x, dy = jax.device_put((x, dy), NamedSharding(mesh, along))
        outputs, _ = run(step_of(f), layer, state, x, dy)
    assert jax.typeof(outputs[-1]).sharding.spec == jax.typeof(x).sharding.spec
    assert error(outputs, expected) < 1e-6


def test_parameters_are_split_over_devices_and_a_donated_state_is_used_up():
    """Tests parameters and memory split along their channels, too (FSDP)."""
    channels, mesh = 2 * DEVICES, mesh_of(devices=DEVICES)
    x, dy = (jnp.concatenate([a] * 4, 1)[:, :channels] for a in arguments(CASE)[:2])
    layer, state = make(channels, "batch", approach=CASE.approach)
    expected, _ = run(step_of(forward), layer, state, x, dy)
    layer, state = put((layer, state), mesh, "devices", channels)
    x, dy = jax.device_put((x, dy), NamedSharding(mesh, SPLIT))
    outputs, sent = run(step_of(forward), layer, state, x, dy, donate="all-except-first")
    assert error(outputs, expected) < 1e-6
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    # Parameters and moments are gathered and sums of gradients spread; x stays where it is.
    assert all(elements <= 4 * DEVICES * channels for _, elements in sent), sent


@pytest.mark.parametrize("name", ["LayerNorm", "LayerNorm, axis=0", "GroupNorm"])
def test_norms_of_one_example_send_nothing_but_gradients_of_their_parameters(name):
    x, dy, _ = arguments(CASE)
    layer, _, f = one_model(name, activation=jax.nn.silu)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(layer, eqx.is_array)))
    step, mesh = step_of(f), mesh_of(devices=DEVICES)
    expected, _ = run(step, layer, None, x, dy)
    on_devices = jax.device_put((x, dy), NamedSharding(mesh, SPLIT))
    for over_devices in (step, over_mesh(step, (SPLIT, WHOLE, WHOLE, SPLIT), mesh)):
        outputs, sent = run(over_devices, layer, None, *on_devices)
        assert error(outputs, expected) < 1e-6
        assert sent == [("all-reduce", parameters)]


SPLITS = {
    "examples": P("a"),
    "examples over both": P(("b", "a")),
    "values": P("b", None, "a"),
    "channels": P("a", "b"),
    "explicit": P("a"),
    "uneven": P(("a", "b")),  # 12 examples over 8 devices
}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        pytest.param(n, s, marks=[] if (n, s) in DRAWN else pytest.mark.long)
        for n in NAMES
        for s in SPLITS
        if (n, s) != ("BatchNorm", "explicit")  # one of WAYS
    ],
)
def test_a_program_that_jit_splits_equals_that_of_one_device_and_gathers_no_x(name, split):
    examples = 12 if split == "uneven" else N
    shape = 12, 64
    x, dy = jax.random.normal(jax.random.key(0), (2, examples, *shape))
    layer, call = made(name, shape)
    mesh = mesh_of(AxisType.Explicit if split == "explicit" else AxisType.Auto, a=4, b=2)
    where = NamedSharding(mesh, SPLITS[split])

    def constrained(layer, _, x, mask):
        return call(layer, jax.lax.with_sharding_constraint(x, where))

    step = step_of(lambda layer, _, x, mask: call(layer, x))
    expected, _ = run(step, layer, None, x, dy)
    if split == "uneven":
        step = step_of(constrained)
    else:
        x, dy = jax.device_put((x, dy), where)
    with jax.set_mesh(mesh):
        outputs, sent = run(step, placed(mesh, WHOLE, layer), None, x, dy)
    assert error(outputs, expected) < 1e-6
    # XLA gathers three groups over two devices, and an axis of several that a row has.
    if (name, split) not in {("GroupNorm", "channels"), *((n, "values") for n in ROWS)}:
        assert all(elements < x.size // 2 for _, elements in sent), sent


@pytest.mark.parametrize("shape", [(C,), (C, 5)])
def test_an_export_over_devices_sends_no_x(shape):
    """Tests a program in which XLA splits the passes of `BatchNorm` itself, as on a TPU."""
    where = NamedSharding(mesh_of(devices=DEVICES), SPLIT)
    layer, state = make(C, "batch", approach="batch")
    x = normal(0, (8 * DEVICES, *shape), 1e3).at[:, 1].set(7.25)  # a constant channel
    f = jax.jit(lambda x: over_batch(layer)(x, state)[0])
    exported = export.export(jax.jit(f, in_shardings=where))(x)
    y, sent = run(exported.call, jax.device_put(x, where))
    assert error(y, f(x)) < 1e-6
    assert (y[:, 1] == 0).all()
    assert all(elements <= 4 * DEVICES * C for _, elements in sent), sent


@pytest.mark.parametrize(("layer", "shape", "dtype"), test_rows.DRAWN[::3])
def test_a_row_has_the_bits_of_one_device(layer, shape, dtype):
    layer, (x, dy) = moved(layer), test_rows.arrays(shape, dtype, 5 * DEVICES)
    expected = test_rows.y_and_gradients(layer, x, dy)[:2]
    mesh = mesh_of(devices=DEVICES)
    split = [jax.device_put(v, NamedSharding(mesh, P("devices"))) for v in (x, dy)]
    assert same(test_rows.y_and_gradients(layer, *split)[:2], expected)
    arrays, static = eqx.partition(layer, eqx.is_array)

    def y_and_dx(arrays, x, dy):
        layer = eqx.combine(arrays, static)
        return y_and_gradients(functools.partial(over_examples, layer), dy, x)

    specs: Any = {"in_specs": (P(), P("devices"), P("devices")), "out_specs": P("devices")}
    mapped = jax.shard_map(y_and_dx, mesh=mesh, **specs)
    assert same(jax.jit(mapped)(arrays, *split), expected)


def test_persistent_cache_finds_programs_that_jit_splits():
    """Tests the setting in docs/devices.md, and that two norms are two programs."""
    setting, events = "jax_remove_custom_partitioning_ptr_from_cache_key", []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    x, _, _ = arguments(CASE)
    x = jax.device_put(x, NamedSharding(mesh_of(devices=DEVICES), SPLIT))
    jax.config.update(setting, True)
    try:
        outputs = []
        for layer in 2 * (LayerNorm(SHAPE), RMSNorm(SHAPE)):
            jax.clear_caches()
            events.clear()
            outputs.append(run(jax.grad(lambda x, f=layer: (jax.vmap(f)(x) ** 3).sum()), x)[0])
    finally:
        jax.config.update(setting, False)
    assert events.count("/jax/compilation_cache/cache_hits") > 0
    assert events.count("/jax/compilation_cache/cache_misses") == 0
    assert (outputs[0] == outputs[2]).all()
    assert (outputs[1] == outputs[3]).all()
    assert not jnp.allclose(outputs[0], outputs[1])


@pytest.mark.parametrize(("kind", "check_vma"), [(LayerNorm, True), (RMSNorm, False)])
def test_gradients_inside_of_shard_map_of_parts_of_an_example(kind, check_vma):
    """Takes each device's gradient of its own loss; their sum depends on x of all devices. A
    norm of queries and keys is split so under tensor parallelism:
    https://github.com/allenai/OLMo/issues/877."""
    x, dy = (v.reshape(N, -1)[:, :24] for v in arguments(CASE)[:2])
    whole = kind(24)
    whole = with_parameters(whole, whole.weight + 1, whole.bias)
    layer = kind(24 // DEVICES, axis_name="devices")
    layer = with_parameters(layer, whole.weight, whole.bias)

    def step(layer, x, dy):
        return y_and_gradients(over_examples, dy, layer, x)

    features = P(None, "devices")
    f = jax.shard_map(
        step,
        mesh=mesh_of(devices=DEVICES),
        in_specs=(SPLIT, features, features),
        out_specs=(features, SPLIT, features),
        check_vma=check_vma,
    )
    outputs, sent = run(f, layer, x, dy)
    assert error(outputs, run(step, whole, x, dy)[0]) < 1e-6
    # Of each example a few numbers: its moments, and backward two sums; of an RMS norm one.
    forward = "all-reduce" if kind is RMSNorm else "all-gather"
    assert [name for name, _ in sent] == [forward, "all-reduce"]
    assert sum(elements for _, elements in sent) <= N * 10 * DEVICES


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_model_made_on_a_mesh_trains_there(kind):
    """Fails if the arrays of a new layer stay on one device under `jax.set_mesh`."""
    mesh = mesh_of(kind, devices=DEVICES)
    with jax.set_mesh(mesh):
        layer, state = make(C, "batch", approach="batch")
        norm = LayerNorm(C)
        for leaf in jax.tree.leaves(eqx.filter((layer, state, norm), eqx.is_array)):
            assert leaf.sharding.mesh == mesh
        x = jax.device_put(normal(0, (2 * DEVICES, C)), NamedSharding(mesh, SPLIT))
        step = eqx.filter_jit(over_batch(layer))
        _, state = step(x, state)
        y, state = step(x, state)
        y = eqx.filter_jit(jax.vmap(norm))(y)
    assert y.sharding.is_equivalent_to(x.sharding, 2)
    assert state.get(layer.memory_index).accepted == 2
