"""Tests that `monitor` changes nothing and gives the expected rows in all transformations."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eqx_norm import BatchNorm, LayerNorm
from eqx_norm.determinism import fingerprint, monitor, monitor_module, recorded
from tests.compiling import filter_jit, jit
from tests.helpers import normal, over_batch, random_layer, same

UNOPTIMISED = True  # compares values: tests/compiling.py

W, X = normal(0, (3, 3)), normal(1, (4, 3))
MESH = Mesh(np.array(jax.devices()[:1]), ("devices",))
over_devices: Any = partial(jax.shard_map, mesh=MESH, in_specs=P("devices"), out_specs=P())


def plain(m, w, x):
    return jnp.sum(m(jnp.tanh(m(x @ w, "h")), "y") ** 2)


def checkpointed(m, w, x):
    block = jax.checkpoint(lambda h: m(jnp.sin(m(jnp.sin(h), "a")), "b"))
    return jnp.sum(jnp.sin(block(x @ w)))


def with_own_rules(m, w, x):
    f = jax.custom_jvp(lambda h: m(jnp.sin(h), "f"))
    f.defjvp(lambda primals, tangents: (f(*primals), 2 * tangents[0]))
    g = jax.custom_vjp(lambda h: m(jnp.sin(h), "g"))
    g.defvjp(lambda h: (g(h), None), lambda _, ct: (m(2 * ct, "ct"),))
    return jnp.sum(m(g(f(x @ w)), "y"))


def in_everything(m, w, x):
    """Calls a layer of this package, and a scan of a remat of a jit, under vmap."""
    layer, state = eqx.nn.make_with_state(BatchNorm)(3, "batch", approach="batch")

    def one(x):
        h, _ = layer(m(w @ x, "h"), state)
        inner = jax.jit(lambda c, _: (m(jnp.tanh(w @ c), "c"), None))
        return m(lax.scan(jax.checkpoint(inner), m(h, "norm"), None, length=2)[0], "y")

    return jnp.sum(jax.vmap(one, axis_name="batch", in_axes=0, out_axes=1)(x) ** 2)


def in_shard_map(m, w, x, check_vma=True):
    """Runs a cond in a scan in a remat in `shard_map`."""

    def step(h, _):
        yes, no = (lambda h: m(jnp.tanh(h @ w), "y")), (lambda h: m(m(h, "n"), "never"))
        return lax.cond(jnp.sum(h) > -1e3, yes, no, h), None

    block = jax.checkpoint(lambda x: lax.scan(step, x, None, length=2)[0])
    total = partial(over_devices, check_vma=check_vma)
    return total(lambda x: lax.psum(jnp.sum(block(x)), "devices"))(x)


def in_remats(m, w, x):
    block = jax.checkpoint(lambda w, h: m(jnp.tanh(w @ h), "h"))
    both = jax.checkpoint(lambda w, h: lax.scan(lambda h, _: (block(w, h), None), h, x[:2])[0])
    return jnp.sum(both(w, x[0]))


def gradient(function):
    return lambda m, w, x: jax.value_and_grad(partial(function, m))(w, x)


def tangent(function):
    return lambda m, w, x: jax.jvp(lambda w: function(m, w, x), (w,), (jnp.ones_like(w),))


# `name@iteration`: + forward, ' tangent, * cotangent; - before rows of a branch not taken.
IN_SHARD_MAP = "-n@0+ -never@0+ y@0+ -n@1+ -never@1+ y@1+ "
IN_SHARD_MAP += "-never@1* -n@1* y@1* -never@0* -n@0* y@0*"
PROGRAMS = {
    "vmap of grad": (jax.vmap(gradient(plain), (None, None, 0)), "h+ y+ y* h*"),
    "jvp of grad of remat": (tangent(gradient(checkpointed)), "a+ a' b+ b' b* a*"),
    "remat of scan of remat": (gradient(in_remats), "h@0+ h@1+ h@1* h@0*"),
    "shard_map": (gradient(in_shard_map), IN_SHARD_MAP),
    "unchecked shard_map": (gradient(partial(in_shard_map, check_vma=False)), IN_SHARD_MAP),
    "custom rules": (gradient(with_own_rules), "f+ g+ y+ y* ct+"),
    "everything": (gradient(in_everything), "h+ norm+ c@0+ c@1+ y+ y* c@1* c@0* norm* h*"),
}


@jit
def prints(values):
    return [fingerprint(value) for value in values]


def rows(record):
    """Returns the rows in the notation of `PROGRAMS`."""
    marks, labels = {"forward": "+", "tangent": "'", "cotangent": "*"}, []
    for probe, row in zip(record.plan, record.fingerprints, strict=True):
        iteration = "".join(f"@{i}" for i in probe.iteration)
        labels.append(f"{'' if row.any() else '-'}{probe.name}{iteration}{marks[probe.kind]}")
    return " ".join(labels)


@pytest.mark.parametrize("name", PROGRAMS)
def test_monitor_changes_no_output_and_records_the_expected_rows(name):
    function, expected = PROGRAMS[name]
    bare, probed = partial(function, lambda x, name: x), partial(function, monitor)
    outputs = jit(bare)(W, X)
    recorded_outputs, record = jit(recorded(probed, keep_values=True))(W, X)
    assert same(recorded_outputs, outputs)
    assert rows(record) == expected
    assert [value.shape for value in record.values] == [probe.shape for probe in record.plan]
    for row, value in zip(record.fingerprints, prints(record.values), strict=True):
        assert same(row, value) or not row.any()
    # Without recording, probes leave nothing in the program.
    if "shard_map" not in name:
        functions = bare, probed, recorded(probed)
        expected, unrecorded, text = (jax.jit(f).lower(W, X).as_text() for f in functions)
        assert unrecorded == expected
        # With recording, the program still prevents XLA from undoing the recomputation.
        assert text.count("optimization_barrier") == expected.count("optimization_barrier")


def test_keep_values_keeps_a_scalar_that_is_equal_on_all_devices():
    def loss(x):
        return monitor(lax.psum(jnp.sum(x), "devices"), "loss")

    y, record = jit(recorded(over_devices(loss), keep_values=True))(X)
    assert same(record.values, [y])


def test_monitor_records_every_dtype_and_a_batch_as_one_value():
    tree = {dtype: X.astype(dtype) for dtype in ("bfloat16", "complex64", "bool")}
    tree["key"] = jax.random.split(jax.random.key(0), (4, 3))

    def step(tree):
        tree = jax.vmap(partial(monitor, name="vmap"), in_axes=1, out_axes=1)(tree)
        tree = lax.cond(X.any(), partial(monitor, name="cond"), lambda tree: tree, tree)
        tree = over_devices(partial(monitor, name="part"), out_specs=P("devices"))(tree)
        return lax.scan(lambda _, row: (None, monitor(row, "scan")), None, tree)[1]

    _, record = jit(recorded(step, keep_values=True))(tree)
    assert len(record.plan) == len(tree) * (3 + 4)
    expected = []
    for probe in record.plan:
        where, name = probe.name.split(".")
        expected.append(tree[name].T if where == "vmap" else tree[name][probe.iteration])
    assert same([*record.fingerprints], prints(expected))


def test_monitor_records_the_arrays_of_a_pytree_as_jax_arrays():
    x, y = np.arange(3), np.float64(0.1)
    tree, record = recorded(lambda: monitor({"x": [x, jnp.sin], "y": y}, "in"))()
    assert (tree["x"][1], rows(record)) == (jnp.sin, "in.x.0+ in.y+")
    assert same([*record.fingerprints], [fingerprint(jnp.asarray(a)) for a in (x, y)])


def test_recording_outputs_eight_bytes_per_row():
    function = recorded(partial(gradient(in_remats), monitor))
    program = jax.jit(function).lower(W, X).compile()
    assert "callback" not in str(program.as_text())
    outputs = [shape.size * shape.dtype.itemsize for shape in jax.tree.leaves(program.out_info)]
    assert outputs == [4, W.nbytes, 8 * 4]


def test_monitor_where_recording_is_impossible_is_an_error():
    def loop(x):
        return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: monitor(c + 1, "c"), x)

    with pytest.raises(NotImplementedError, match=r"monitor\(..., 'c'\) is in a 'while'"):
        recorded(loop)(X)
    with pytest.raises(ValueError, match="inside a derivative .* cotangent of 'w'"):
        jax.grad(recorded(lambda w: jnp.sum(monitor(w, "w"))), has_aux=True)(W)
    with pytest.raises(ValueError, match=r"monitor\(..., name=''\): pass a name"):
        monitor(X, "")


LINEAR = random_layer(eqx.nn.Linear, 3, 3)
NORM = BatchNorm(3, "batch", approach="batch", activation=eqx.nn.PReLU())
MODEL = eqx.nn.Sequential([LINEAR, NORM, eqx.nn.Sequential([LayerNorm(3), LINEAR])])


def test_monitor_module_records_layers_by_path_and_changes_no_output():
    def loss(model, wrap):
        y, state = over_batch(wrap(model))(X, eqx.nn.State(MODEL))
        return jnp.sum(y**2), state

    step = eqx.filter_value_and_grad(loss, has_aux=True)
    outputs, record = filter_jit(recorded(step))(MODEL, partial(monitor_module, name="m"))
    assert eqx.tree_equal(outputs, filter_jit(step)(MODEL, lambda model: model))
    layers = [f"m.layers.{i}" for i in ("0", "1", "2.layers.0", "2.layers.1", "2")] + ["m"]
    expected = [f"{name}+" for name in layers] + [f"{name}*" for name in reversed(layers)]
    assert rows(record) == " ".join(expected)


def test_monitored_model_keeps_weights_structure_and_serialisation(tmp_path):
    monitored = monitor_module(MODEL)
    assert same(*(eqx.filter(m, eqx.is_array) for m in (MODEL, monitored)))
    # A second call, also on a monitored model, gives the same structure, compiled once.
    for again in (monitor_module(MODEL), monitor_module(monitored)):
        assert jax.tree.structure(again) == jax.tree.structure(monitored)
    zeros = eqx.tree_at(lambda m: m.layers[0].weight, monitored, jnp.zeros((3, 3)))
    assert isinstance(zeros.layers[0], eqx.nn.Linear)
    eqx.tree_serialise_leaves(tmp_path / "weights", zeros)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "weights", MODEL)
    assert not loaded.layers[0].weight.any()


def test_monitor_module_names_a_single_layer_by_its_class():
    for model in (LINEAR, eqx.nn.Lambda(jnp.tanh), LayerNorm(3, activation=eqx.nn.PReLU())):
        _, record = eqx.filter_eval_shape(recorded(jax.vmap(monitor_module(model))), X)
        assert [probe.name for probe in record.plan] == [type(model).__name__]
    with pytest.raises(ValueError, match="no layer in this dict"):
        monitor_module({"weight": X})
