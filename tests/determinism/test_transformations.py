"""`monitor` under every transformation: nothing changes, and the rows are those due."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eqx_norm import BatchNorm
from eqx_norm.determinism import (
    Ledger,
    fingerprint,
    hexadecimal,
    monitor,
    read,
    recorded,
    recorded_into,
)
from eqx_norm.determinism._record import places

from ..helpers import bits, normal

W, X = normal(0, (3, 3)), normal(1, (4, 3))

fingerprint_of = jax.jit(fingerprint)


def plain(m, w, x):
    return jnp.sum(m(jnp.tanh(m(x @ w, "h")), "y") ** 2)


def vmapped(m, w, x):
    def one(x):
        return jnp.sum(m(jnp.tanh(m(w @ x, "h")), "y") ** 2)

    return jax.vmap(one)(x).mean()


def jitted_twice(m, w, x):
    layer = jax.jit(lambda x: m(jnp.sin(x), "layer"))
    return jnp.sum(layer(layer(x @ w)))


def scanned(m, w, x):
    def step(carry, x):
        carry = m(jnp.tanh(w @ carry + x), "carry")
        return carry, jnp.sum(carry)

    return jnp.sum(lax.scan(step, x[0], x[:2])[1])


def checkpointed(m, w, x):
    @jax.checkpoint
    def block(w):
        return m(jnp.sin(m(jnp.sin(w), "a")), "b")

    return jnp.sum(jnp.sin(block(x @ w)))


def branching(m, w, x):
    def yes(h):
        return m(jnp.sin(h), "yes")

    def no(h):
        return m(m(jnp.cos(h), "no"), "never")

    return jnp.sum(lax.cond(jnp.sum(x) > -1e3, yes, no, x @ w))


def sharded(m, w, x, check_vma=True):
    def part(w, x):
        return lax.psum(jnp.sum(jnp.tanh(m(m(x, "x") @ m(w, "w"), "h"))), "devices")

    mesh = Mesh(np.array(jax.devices()[:1]), ("devices",))
    specs: Any = {"in_specs": (P(), P("devices")), "out_specs": P()}
    return jax.shard_map(part, mesh=mesh, check_vma=check_vma, **specs)(w, x)


def with_own_jvp(m, w, x):
    @jax.custom_jvp
    def f(h):
        return m(jnp.sin(h), "inside")

    f.defjvp(lambda primals, tangents: (f(*primals), 2 * tangents[0]))
    return jnp.sum(m(f(x @ w), "outside"))


def with_own_vjp(m, w, x):
    @jax.custom_vjp
    def f(h):
        return m(jnp.sin(h), "inside")

    f.defvjp(lambda h: (f(h), None), lambda _, ct: (m(2 * ct, "mine"),))
    return jnp.sum(m(f(x @ w), "outside"))


def in_everything(m, w, x):
    """The layers of this package, a scan of remat of jit, under vmap."""
    layer, state = eqx.nn.make_with_state(BatchNorm)(3, "batch", approach="batch")

    def one(x):
        h, _ = layer(m(w @ x, "h"), state)

        @jax.jit
        def inner(c, _):
            return m(jnp.tanh(w @ c), "c"), None

        return m(lax.scan(jax.checkpoint(inner), m(h, "norm"), None, length=2)[0], "y")

    return jnp.sum(jax.vmap(one, axis_name="batch", in_axes=0, out_axes=1)(x) ** 2)


class Case(NamedTuple):
    function: Callable[..., Any]
    forward: str
    backward: str  # of its gradient, after the forward rows


CASES = [
    Case(plain, "h y", "y h"),
    Case(vmapped, "h y", "y h"),
    Case(jitted_twice, "layer layer#2", "layer layer#2"),
    Case(scanned, "carry@0 carry@1", "carry@1 carry@0"),
    Case(checkpointed, "a b", "b a"),
    Case(branching, "-no -never yes", "-never -no yes"),
    Case(sharded, "x w h", "h w"),
    Case(functools.partial(sharded, check_vma=False), "x w h", "h w"),
    Case(with_own_jvp, "inside outside", "outside"),
    Case(with_own_vjp, "inside outside", "outside mine+"),
    Case(in_everything, "h norm c@0 c@1 y", "y c@1 c@0 norm h"),
]


def name_of(value):
    function = getattr(value, "function", value)
    name = getattr(getattr(function, "func", function), "__name__", None)
    return name and name + ("_unchecked" if isinstance(function, functools.partial) else "")


def unmonitored(tree, name):
    return tree


def labels(rows):
    """`name@iteration#again`, with `-` before what was not passed and a mark for the kind."""
    marks = {"forward": "+", "tangent": "'", "cotangent": "*"}
    return " ".join(
        ("" if row.fingerprint else "-")
        + row.probe
        + "".join(f"@{i}" for i in row.iteration)
        + (f"#{row.again}" if row.again > 1 else "")
        + marks[row.kind]
        for row in rows
    )


def marked(names, mark):
    return " ".join(name if name[-1] in "+*'" else name + mark for name in names.split())


def check(function, expected, tmp_path, *arguments):
    """Runs it without probes, with them, and with both transports."""
    outputs = jax.jit(functools.partial(function, unmonitored))(*arguments)
    probed = functools.partial(function, monitor)
    ours, record = jax.jit(recorded(probed, keep_values=True))(*arguments)
    assert [*map(bits, jax.tree.leaves(ours))] == [*map(bits, jax.tree.leaves(outputs))]
    with Ledger(tmp_path / "returned") as ledger:
        ledger.append(0, record)
    rows = read(tmp_path / "returned").rows
    assert labels(rows) == expected
    for place, row in zip(places(record.plan), rows, strict=True):
        value = record.values[place.number][place.iteration]
        assert value.shape == row.shape
        if row.fingerprint:
            assert hexadecimal(fingerprint_of(value)) == row.fingerprint
    with Ledger(tmp_path / "called back") as ledger:
        ours = jax.jit(recorded_into(ledger, probed))(0, *arguments)
    assert [*map(bits, jax.tree.leaves(ours))] == [*map(bits, jax.tree.leaves(outputs))]
    called_back = read(tmp_path / "called back").rows
    assert [row._replace(values=None) for row in rows] == list(called_back)


def rows_of(tmp_path, function, *arguments):
    with Ledger(tmp_path / "rows") as ledger:
        ledger.append(0, jax.jit(recorded(function))(*arguments)[1])
    return read(ledger.path).rows


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradients(case, tmp_path):
    def value_and_grad(m, w, x):
        return jax.value_and_grad(functools.partial(case.function, m))(w, x)

    expected = marked(case.forward, "+") + " " + marked(case.backward, "*")
    check(value_and_grad, expected, tmp_path, W, X)


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 3, 4, 6, 7)], ids=name_of)
def test_tangents(case, tmp_path):
    def jvp(m, w, x):
        return jax.jvp(lambda w: case.function(m, w, x), (w,), (jnp.ones_like(w),))

    check(jvp, with_tangents(case), tmp_path, W, X)


def with_tangents(case):
    moving = [name for name in case.forward.split() if name != "x"]
    if case.function is scanned:
        return "carry@0+ carry@0' carry@1+ carry@1'"
    return " ".join(f"{n}+ {n}'" if n in moving else f"{n}+" for n in case.forward.split())


def looped(m, w, x):
    return jnp.sum(lax.fori_loop(0, 2, lambda _, h: m(jnp.sin(h), "turn"), x @ w))


def switched(m, w, x):
    branches = [lambda h, i=i: m(h * i, f"branch{i}") for i in range(3)]
    return jnp.sum(lax.switch(jnp.int32(1), branches, x @ w))


def mapped(m, w, x):
    return jnp.sum(lax.map(lambda x: m(w @ x, "h"), x[:2]))


def saved_by_policy(m, w, x):
    policy = jax.checkpoint_policies.dots_saveable
    block = jax.checkpoint(lambda w: jnp.sin(m(x @ m(jnp.sin(w), "a"), "b")), policy=policy)
    return jnp.sum(jnp.sin(block(w)))


def for_each_platform(m, w, x):
    return jnp.sum(lax.platform_dependent(x @ w, cpu=lambda h: m(jnp.sin(h), "h")))


DERIVATIVES = {
    "fori_loop": (jax.grad(looped, 1), "turn@0+ turn@1+ turn@1* turn@0*"),
    "switch": (
        jax.grad(switched, 1),
        "-branch0+ branch1+ -branch2+ -branch0* branch1* -branch2*",
    ),
    "map": (jax.grad(mapped, 1), "h@0+ h@1+ h@1* h@0*"),
    "policy": (jax.grad(saved_by_policy, 1), "a+ b+ b* a*"),
    "platform": (jax.grad(for_each_platform, 1), "h+ h*"),
    "jacfwd": (jax.jacfwd(plain, 1), "h+ h' y+ y'"),
    "jacrev": (jax.jacrev(plain, 1), "h+ y+ y* h*"),
    "vmap of grad": (
        lambda m, w, x: jax.vmap(jax.grad(plain, 1), (None, None, 0))(m, w, x[:, None]),
        "h+ y+ y* h*",
    ),
    "linearize": (
        lambda m, w, x: jax.linearize(lambda w: plain(m, w, x), w)[1](w),
        "h+ y+ h' y'",
    ),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_other_ways_to_derivatives(name, tmp_path):
    function, expected = DERIVATIVES[name]
    rows = rows_of(tmp_path, functools.partial(function, monitor), W, X)
    assert labels(rows) == expected
    ours = jax.jit(functools.partial(function, monitor))(W, X)
    assert bits(ours) == bits(jax.jit(functools.partial(function, unmonitored))(W, X))


def test_hessian_vector_products(tmp_path):
    def product(m, w, x):
        return jax.jvp(jax.grad(lambda w: vmapped(m, w, x)), (w,), (jnp.ones_like(w),))

    check(product, "h+ h' y+ y' y* h*", tmp_path, W, X)


@pytest.mark.parametrize("case", CASES[:5], ids=name_of)
def test_without_recording_there_is_nothing_left_of_a_probe(case):
    def text(m):
        grad = jax.grad(functools.partial(case.function, m))
        return jax.jit(grad).lower(W, X).as_text()

    assert text(monitor) == text(unmonitored)


def test_eagerly_as_well(tmp_path):
    step = jax.jit(jax.grad(functools.partial(vmapped, monitor)))
    with Ledger(tmp_path / "eager") as ledger:
        for i in range(2):
            gradient, record = recorded(step)(W, X)
            assert bits(gradient) == bits(step(W, X))
            ledger.append(i, record)
    first, second = np.split(np.array([r.fingerprint for r in read(ledger.path).rows]), 2)
    assert list(first) == list(second)
    assert bits(monitor(W, "w")) == bits(W)


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
    with Ledger(tmp_path / "a") as ledger:
        ledger.append(0, jax.tree.map(lambda a: a[1], records))
        with pytest.raises(ValueError, match="Take one out of a vmap or scan"):
            ledger.append(1, records)
    assert read(ledger.path).rows[0].fingerprint == hexadecimal(fingerprint_of(X[1]))


def test_steps_may_be_scanned_with_callbacks(tmp_path):
    with Ledger(tmp_path / "a") as ledger:
        step = recorded_into(ledger, lambda c: monitor(jnp.sin(c), "c"))
        jax.jit(lambda x: lax.scan(lambda c, i: (step(i, c), None), x, jnp.arange(5))[0])(X)
    rows = read(ledger.path).rows
    assert [row.step for row in rows] == list(range(5))
    assert rows[0].fingerprint == hexadecimal(fingerprint_of(jax.jit(jnp.sin)(X)))


TREE = {
    "weights": [X, X.astype(jnp.bfloat16)],
    "steps": jnp.arange(3),
    "mask": X > 0,
    "key": jax.random.key(0),
    "none": None,
    "function": jnp.sin,
    "number": 1.5,
    "numpy": np.arange(4, dtype=np.int16),
}


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
    """Of each leaf: its fingerprint, and then that of each of its rows."""
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
    probed = functools.partial(step, monitor)
    rows = rows_of(tmp_path, probed, EVERY["inexact"])
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
    @eqx.filter_jit
    @recorded
    def step(tree):
        return monitor(tree, "tree")

    tree, record = step(TREE)
    assert tree["function"] is jnp.sin
    assert tree["number"] == 1.5
    found = {
        place.probe.name: hexadecimal(pair)
        for place, pair in zip(places(record.plan), record.fingerprints, strict=True)
    }
    expected = {
        "tree.key": TREE["key"],
        "tree.mask": TREE["mask"],
        "tree.numpy": TREE["numpy"],
        "tree.steps": TREE["steps"],
        "tree.weights.0": X,
        "tree.weights.1": TREE["weights"][1],
    }
    assert found == {name: hexadecimal(fingerprint_of(leaf)) for name, leaf in expected.items()}


def test_a_while_loop_is_refused():
    def loop(x):
        return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: monitor(c + 1, "c"), x)

    with pytest.raises(NotImplementedError, match="'c'.*not known beforehand.*lax.scan"):
        recorded(loop)(X)
    # It does no harm where nothing is recorded.
    jax.jit(loop)(X)


def test_inside_of_what_cannot_be_seen_into_is_refused():
    def solve(x):
        return lax.custom_linear_solve(
            lambda v: monitor(2 * v, "v"), x, lambda _, b: b / 2, symmetric=True
        )

    with pytest.raises(NotImplementedError, match="'v'.*'custom_linear_solve'"):
        recorded(solve)(X)


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


def test_nothing_leaves_the_device_but_eight_bytes_a_row(tmp_path):
    def step(w, x):
        return jax.value_and_grad(functools.partial(in_everything, monitor))(w, x)

    program = jax.jit(recorded(step)).lower(W, X).compile()
    assert "callback" not in str(program.as_text())
    outputs = [shape.size * shape.dtype.itemsize for shape in jax.tree.leaves(program.out_info)]
    assert outputs == [4, W.nbytes, 8 * 10]
    with Ledger(tmp_path / "a") as ledger:
        text = jax.jit(recorded_into(ledger, step)).lower(0, W, X).as_text()
    assert text.count("stablehlo.custom_call @xla_ffi_python_cpu_callback") == 1
