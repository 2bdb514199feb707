"""`monitor` takes any tree of any dtype, and a batch as one value."""

import functools
from collections import Counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eqx_norm.determinism import fingerprint, monitor, recorded
from eqx_norm.determinism._fingerprint import hexadecimal
from tests.determinism.harness import rows_of
from tests.helpers import bits, normal, same

X = normal(1, (4, 3))


def test_a_batch_is_one_value_wherever_vmap_puts_it():
    x = normal(0, (4, 3, 2))
    for axis in range(3):
        one = jax.vmap(lambda x: monitor(x, "x"), in_axes=axis, out_axes=axis)
        _, record = jax.jit(recorded(one))(jnp.moveaxis(x, 0, axis))
        assert same(record.fingerprints[0], fingerprint(x))


def test_an_ensemble_has_a_record_for_each_member(tmp_path):
    _, records = jax.jit(jax.vmap(recorded(lambda x: monitor(x, "x"))))(X)
    (row,) = rows_of(tmp_path / "a", jax.tree.map(lambda a: a[1], records))
    assert row.fingerprint == hexadecimal(fingerprint(X[1]))
    with pytest.raises(ValueError, match="Take one out of a vmap or scan"):
        rows_of(tmp_path / "b", records)


EVERY = {
    "inexact": [X.astype(dtype) for dtype in ("float32", "bfloat16", "float16", "complex64")],
    "integers": [X.astype(dtype) for dtype in ("int32", "uint8", "int16", "bool")],
    "keys": [jax.random.split(jax.random.key(0, impl=impl), 4) for impl in (None, "rbg")],
    "narrow": X.astype(jnp.float8_e4m3fn),
}


def through_all(tree):
    mesh = Mesh(np.array(jax.devices()[:1]), ("devices",))
    specs: Any = {"in_specs": P("devices"), "out_specs": P("devices")}
    tree = jax.vmap(lambda t: monitor(t, "vmap"))(tree)
    tree = lax.scan(lambda _, t: (None, monitor(t, "scan")), None, tree)[1]
    tree = jax.checkpoint(lambda t: monitor(t, "remat"))(tree)
    yes, no = (functools.partial(monitor, name=name) for name in ("yes", "no"))
    tree = lax.cond(jnp.sum(tree["inexact"][0]) > -1e3, yes, no, tree)
    tree = jax.shard_map(lambda t: monitor(t, "shard_map"), mesh=mesh, **specs)(tree)
    return jax.jit(lambda t: monitor(t, "jit"))(tree)


def test_every_dtype_under_every_transformation(tmp_path):
    def loss(inexact):
        tree = through_all({**EVERY, "inexact": inexact})
        return sum(jnp.sum(jnp.real(x).astype(jnp.float32)) for x in tree["inexact"]), tree

    step = jax.value_and_grad(loss, has_aux=True)
    ((_, tree), gradient), record = jax.jit(recorded(step))(EVERY["inexact"])
    assert same(data(tree), data(EVERY))
    assert same(gradient, jax.tree.map(jnp.ones_like, gradient))
    given = {"forward": EVERY, "cotangent": {"inexact": gradient}}
    leaves = {
        (kind, jax.tree_util.keystr(path, simple=True, separator=".")): leaf
        for kind, tree in given.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(data(tree))
    }
    counts = Counter()
    for row in rows_of(tmp_path / "rows", record):
        where, _, name = row.probe.partition(".")
        counts[where, row.kind, name] += 1
        leaf = np.asarray(leaves[row.kind, name])[row.iteration]
        assert row.fingerprint == (None if where == "no" else hexadecimal(fingerprint(leaf)))
    per_pass = {"vmap": 1, "scan": 4, "remat": 1, "yes": 1, "no": 1, "shard_map": 1, "jit": 1}
    assert counts == {(where, *leaf): per_pass[where] for where in per_pass for leaf in leaves}


def data(tree):
    """Returns the tree with each key's data in its place."""

    def of(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return jax.tree.map(of, tree)


def test_each_array_of_any_tree_has_a_row():
    arrays = {"numpy": np.arange(4, dtype=np.int16), "weights": [X, X > 0]}
    rest = {"none": None, "function": jnp.sin, "number": 1.5}
    step = eqx.filter_jit(recorded(lambda tree: monitor(tree, "tree")))
    tree, record = step(arrays | rest)
    assert rest == {name: tree[name] for name in rest}
    names = [probe.name for probe in record.plan]
    assert names == ["tree.numpy", "tree.weights.0", "tree.weights.1"]
    assert same([*record.fingerprints], [*map(fingerprint, jax.tree.leaves(arrays))])
    with pytest.raises(ValueError, match="give the name"):
        monitor(X, "")


def test_numpy_arrays_of_64_bits_are_recorded_if_their_values_stay():
    for value in (np.arange(3), np.float64(0.5), np.array([np.nan])):
        _, record = recorded(lambda value=value: monitor(value, "x"))()
        assert same(record.fingerprints[0], fingerprint(jnp.asarray(value)))
    for lost in (np.array([2**32 + 5]), np.float64(0.1), np.array([1e-300 + 1j])):
        with pytest.raises(ValueError, match="'in.x' is a NumPy array of .*set jax_enable_x64"):
            monitor({"x": lost}, "in")
        with jax.enable_x64(True):
            assert bits(monitor(lost, "in")) == lost.tobytes()
