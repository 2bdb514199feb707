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
from tests.helpers import bits, normal

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
    nested = jax.vmap(jax.vmap(lambda x: monitor(x, "x"), in_axes=1), in_axes=1)
    assert row(nested, x.transpose(1, 0, 2).swapaxes(1, 2).transpose(2, 0, 1)) != whole
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


def key_bits(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return bits(jax.random.key_data(leaf) if is_key else leaf)


def whole_and_rows(tree):
    """Returns the fingerprint of each leaf, and then that of each of its rows."""
    return jax.tree.map(
        lambda leaf: jnp.stack([fingerprint(leaf), *jax.vmap(fingerprint)(leaf)]), tree
    )


def test_every_dtype_under_every_transformation(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:1]), ("devices",))
    specs: Any = {"in_specs": P("devices"), "out_specs": P("devices")}

    def through(m, tree):
        tree = jax.vmap(lambda t: m(t, "vmap"))(tree)
        tree = lax.scan(lambda _, t: (None, m(t, "scan")), None, tree)[1]
        tree = jax.checkpoint(lambda t: m(t, "remat"))(tree)
        yes, no = (functools.partial(m, name=name) for name in ("yes", "no"))
        tree = lax.cond(jnp.sum(tree["inexact"][0]) > -1e3, yes, no, tree)
        tree = jax.shard_map(lambda t: m(t, "shard_map"), mesh=mesh, **specs)(tree)
        return jax.jit(lambda t: m(t, "jit"))(tree)

    def step(m, inexact):
        def loss(inexact):
            tree = through(m, {**EVERY, "inexact": inexact})
            return sum(jnp.sum(jnp.real(x).astype(jnp.float32)) for x in tree["inexact"]), tree

        return jax.value_and_grad(loss, has_aux=True)(inexact)

    (_, tree), gradient = jax.jit(functools.partial(step, monitor))(EVERY["inexact"])
    assert [*map(key_bits, jax.tree.leaves(tree))] == [*map(key_bits, jax.tree.leaves(EVERY))]
    assert all(bits(g) == bits(jnp.ones_like(g)) for g in gradient)
    record = jax.jit(recorded(functools.partial(step, monitor)))(EVERY["inexact"])[1]
    rows = rows_of(tmp_path / "rows", record)
    leaves, _ = jax.tree_util.tree_flatten_with_path(EVERY)
    prints = {
        kind: jax.tree.leaves(jax.jit(whole_and_rows)(tree))
        for kind, tree in (
            ("forward", EVERY),
            ("cotangent", jax.tree.map(jnp.ones_like, EVERY["inexact"])),
        )
    }
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    for row in rows:
        where, _, name = row.probe.partition(".")
        number = names.index(name)
        assert row.shape == leaves[number][1].shape[len(row.iteration) :]
        place = 1 + row.iteration[0] if row.iteration else 0
        expected = hexadecimal(prints[row.kind][number][place])
        assert row.fingerprint == (None if where == "no" else expected)
    counts = Counter((row.probe.partition(".")[0], row.kind) for row in rows)
    per_pass = {"vmap": 1, "scan": 4, "remat": 1, "yes": 1, "no": 1, "shard_map": 1, "jit": 1}
    assert counts == {
        **{(where, "forward"): n * len(leaves) for where, n in per_pass.items()},
        **{(where, "cotangent"): n * len(EVERY["inexact"]) for where, n in per_pass.items()},
    }


def test_any_tree_and_each_of_its_arrays():
    arrays = {
        "key": jax.random.key(0),
        "mask": X > 0,
        "numpy": np.arange(4, dtype=np.int16),
        "steps": jnp.arange(3),
        "weights": [X, X.astype(jnp.bfloat16)],
    }
    rest = {"none": None, "function": jnp.sin, "number": 1.5}
    step = eqx.filter_jit(recorded(lambda tree: monitor(tree, "tree")))
    tree, record = step(arrays | rest)
    assert rest == {name: tree[name] for name in rest}
    names = [place.probe.name for place in places(record.plan)]
    inside = ("key", "mask", "numpy", "steps", "weights.0", "weights.1")
    assert names == [f"tree.{name}" for name in inside]
    expected = [bits(fingerprint_of(leaf)) for leaf in jax.tree.leaves(arrays)]
    assert [*map(bits, record.fingerprints)] == expected


def in_while(x):
    return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: monitor(c + 1, "c"), x)


def in_solve(x):
    def double(v):
        return monitor(2 * v, "v")

    return lax.custom_linear_solve(double, x, lambda _, b: b / 2, symmetric=True)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (in_while, "'c'.*not known beforehand.*lax.scan"),
        (in_solve, "'v'.*'custom_linear_solve'"),
    ],
)
def test_what_cannot_be_seen_into_is_refused_where_it_is_recorded(function, says):
    with pytest.raises(NotImplementedError, match=says):
        recorded(function)(X)
    jax.jit(function)(X)


def test_inside_of_a_derivative_is_refused():
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
