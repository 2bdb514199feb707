"""`monitor` takes any tree of any dtype, and says where it cannot be."""

import functools
import inspect
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

from eqx_norm.determinism import fingerprint, hexadecimal, monitor, recorded
from eqx_norm.determinism._record import places
from tests.determinism.harness import rows_of
from tests.helpers import bits, normal, same

W, X = normal(0, (3, 3)), normal(1, (4, 3))

fingerprint_of = jax.jit(fingerprint)


def test_a_batch_is_one_value_wherever_vmap_puts_it():
    x = normal(0, (4, 3, 2))

    def row(f, x):
        return hexadecimal(jax.jit(recorded(f))(x)[1].fingerprints[0])

    whole = row(lambda x: monitor(x, "x"), x)
    assert whole == hexadecimal(fingerprint_of(x))
    for axis in range(3):
        one = jax.vmap(lambda x: monitor(x, "x"), in_axes=axis, out_axes=axis)
        assert row(one, jnp.moveaxis(x, 0, axis)) == whole
    assert row(jax.vmap(jax.vmap(lambda x: monitor(x, "x"))), x) == whole


def test_an_ensemble_has_a_record_for_each_member(tmp_path):
    step = jax.jit(jax.vmap(recorded(lambda x: monitor(x, "x"))))
    _, records = step(X)
    assert records.fingerprints.shape == (4, 1, 2)
    (row,) = rows_of(tmp_path / "a", jax.tree.map(lambda a: a[1], records))
    assert row.fingerprint == hexadecimal(fingerprint_of(X[1]))
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
    names = [place.probe.name for place in places(record.plan)]
    assert names == ["tree.numpy", "tree.weights.0", "tree.weights.1"]
    expected = [fingerprint(leaf) for leaf in jax.tree.leaves(arrays)]
    assert same([*record.fingerprints], expected)


def in_while(x):
    return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: monitor(c + 1, "c"), x)


def in_solve(x):
    def double(v):
        return monitor(2 * v, "v")

    return lax.custom_linear_solve(double, x, lambda _, b: b / 2, symmetric=True)


def test_where_it_cannot_be_recorded_is_an_error():
    for function, says in (
        (in_while, "'c'.*not known beforehand.*lax.scan"),
        (in_solve, "'v'.*'custom_linear_solve'"),
    ):
        with pytest.raises(NotImplementedError, match=says):
            recorded(function)(X)
        jax.jit(function)(X)
    step = recorded(lambda w: jnp.sum(monitor(w, "w")))
    with pytest.raises(ValueError, match="cotangent of 'w'.*jax.jit\\(recorded\\(step\\)\\)"):
        jax.grad(step, has_aux=True)(W)


def test_numpy_arrays_of_64_bits_are_recorded_if_their_values_stay():
    """Without x64, JAX makes 32 bits of them."""
    kept = {"counts": np.arange(3), "half": np.float64(0.5), "nan": np.array([np.nan])}
    _, record = recorded(lambda: monitor(kept, "in"))()
    prints = dict(zip(sorted(kept), map(hexadecimal, record.fingerprints), strict=True))
    for name, value in kept.items():
        assert prints[name] == hexadecimal(fingerprint_of(jnp.asarray(value)))
    for lost in (np.array([2**32 + 5]), np.float64(0.1), np.array([1e-300 + 1j])):
        with pytest.raises(ValueError, match="'in.x' is a NumPy array of .*x64 is off"):
            monitor({"x": lost}, "in")
        with jax.enable_x64(True):
            assert bits(monitor(lost, "in")) == lost.tobytes()


def test_names_are_checked():
    # Without its annotations, which are checked in these tests before it can say anything.
    with pytest.raises(TypeError, match="name=3"):
        inspect.unwrap(monitor)(X, 3)  # type: ignore
    with pytest.raises(ValueError, match="give the name"):
        monitor(X, "")
