"""`monitor` under every transformation: nothing changes, and the rows are those due."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eqx_norm import BatchNorm
from eqx_norm.determinism import fingerprint, monitor, recorded
from eqx_norm.determinism._fingerprint import hexadecimal
from tests.determinism.harness import rows_of
from tests.helpers import bits, normal, same

W, X = normal(0, (3, 3)), normal(1, (4, 3))
MESH = Mesh(np.array(jax.devices()[:1]), ("devices",))

fingerprint_of = jax.jit(fingerprint)


def plain(m, w, x):
    return jnp.sum(m(jnp.tanh(m(x @ w, "h")), "y") ** 2)


def vmapped(m, w, x):
    return jax.vmap(lambda x: plain(m, w, x))(x).mean()


def jitted_twice(m, w, x):
    layer = jax.jit(lambda h: m(jnp.sin(h), "layer"))
    return jnp.sum(layer(layer(x @ w)))


def scanned(m, w, x):
    def step(carry, x):
        carry = m(jnp.tanh(w @ carry + x), "carry")
        return carry, jnp.sum(carry)

    return jnp.sum(lax.scan(step, x[0], x[:2])[1])


def checkpointed(m, w, x):
    block = jax.checkpoint(lambda h: m(jnp.sin(m(jnp.sin(h), "a")), "b"))
    return jnp.sum(jnp.sin(block(x @ w)))


def branching(m, w, x):
    yes, no = (lambda h: m(jnp.sin(h), "yes")), (lambda h: m(m(jnp.cos(h), "no"), "never"))
    return jnp.sum(lax.cond(jnp.sum(x) > -1e3, yes, no, x @ w))


def sharded(m, w, x, check_vma=True):
    def part(w, x):
        return lax.psum(jnp.sum(jnp.tanh(m(m(x, "x") @ m(w, "w"), "h"))), "devices")

    specs: Any = {"in_specs": (P(), P("devices")), "out_specs": P()}
    return jax.shard_map(part, mesh=MESH, check_vma=check_vma, **specs)(w, x)


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
    """Has a layer of this package, and a scan of a remat of a jit, under vmap."""
    layer, state = eqx.nn.make_with_state(BatchNorm)(3, "batch", approach="batch")

    def one(x):
        h, _ = layer(m(w @ x, "h"), state)

        @jax.jit
        def inner(c, _):
            return m(jnp.tanh(w @ c), "c"), None

        return m(lax.scan(jax.checkpoint(inner), m(h, "norm"), None, length=2)[0], "y")

    return jnp.sum(jax.vmap(one, axis_name="batch", in_axes=0, out_axes=1)(x) ** 2)


def in_shard_map(m, w, x):
    """Has a cond in a scan in a remat, whose gradient is an `eval_jaxpr` in jax 0.12."""

    def step(h, _):
        yes, no = (lambda h: m(jnp.tanh(h @ w), "yes")), (lambda h: m(h, "no"))
        return lax.cond(jnp.sum(h) > -1e3, yes, no, h), None

    def part(x):
        block = jax.checkpoint(lambda x: lax.scan(step, x, None, length=2)[0])
        return lax.psum(jnp.sum(block(x)), "devices")

    return jax.shard_map(part, mesh=MESH, in_specs=P("devices"), out_specs=P())(x)


def in_remats(m, w, x):
    block = jax.checkpoint(lambda w, h: m(jnp.tanh(w @ h), "h"))
    blocks = jax.checkpoint(
        lambda w, h: lax.scan(lambda h, _: (block(w, h), None), h, None, length=2)[0]
    )
    return jnp.sum(blocks(w, x[0]))


def gradient(function):
    return lambda m, w, x: jax.value_and_grad(functools.partial(function, m))(w, x)


def tangent(function):
    return lambda m, w, x: jax.jvp(lambda w: function(m, w, x), (w,), (jnp.ones_like(w),))


# `name@iteration#again`, with `-` before what was not passed, and a mark for the kind:
# + forward, ' tangent, * cotangent.
PROGRAMS = {
    "grad": (gradient(plain), "h+ y+ y* h*"),
    "vmap": (gradient(vmapped), "h+ y+ y* h*"),
    "jit": (gradient(jitted_twice), "layer+ layer#2+ layer* layer#2*"),
    "scan": (gradient(scanned), "carry@0+ carry@1+ carry@1* carry@0*"),
    "remat": (gradient(checkpointed), "a+ b+ b* a*"),
    "cond": (gradient(branching), "-no+ -never+ yes+ -never* -no* yes*"),
    "shard_map": (gradient(sharded), "x+ w+ h+ h* w*"),
    "shard_map, unchecked": (
        gradient(functools.partial(sharded, check_vma=False)),
        "x+ w+ h+ h* w*",
    ),
    "shard_map of remat": (
        gradient(in_shard_map),
        "-no@0+ yes@0+ -no@1+ yes@1+ -no@1* yes@1* -no@0* yes@0*",
    ),
    "remat of scan of remat": (gradient(in_remats), "h@0+ h@1+ h@1* h@0*"),
    "custom_jvp": (gradient(with_own_jvp), "inside+ outside+ outside*"),
    "custom_vjp": (gradient(with_own_vjp), "inside+ outside+ outside* mine+"),
    "everything": (gradient(in_everything), "h+ norm+ c@0+ c@1+ y+ y* c@1* c@0* norm* h*"),
    "jvp": (tangent(plain), "h+ h' y+ y'"),
    "jvp of remat": (tangent(checkpointed), "a+ a' b+ b'"),
    "jvp of shard_map": (tangent(sharded), "x+ w+ w' h+ h'"),
    "jvp of grad": (
        tangent(lambda m, w, x: jax.grad(functools.partial(vmapped, m))(w, x)),
        "h+ h' y+ y' y* h*",
    ),
    "vmap of grad": (
        lambda m, w, x: jax.vmap(jax.grad(plain, 1), (None, None, 0))(m, w, x[:, None]),
        "h+ y+ y* h*",
    ),
    "jvp of grad of remat": (
        tangent(lambda m, w, x: jax.grad(functools.partial(checkpointed, m))(w, x)),
        "a+ a' b+ b' b* a*",
    ),
    "linearize of remat": (
        lambda m, w, x: jax.linearize(lambda w: checkpointed(m, w, x), w)[1](w),
        "a+ b+ a' b'",
    ),
    "linearize": (
        lambda m, w, x: jax.linearize(lambda w: plain(m, w, x), w)[1](w),
        "h+ y+ h' y'",
    ),
}


def unmonitored(tree, name):
    return tree


def labels(rows):
    marks = {"forward": "+", "tangent": "'", "cotangent": "*"}
    return " ".join(
        ("" if row.fingerprint else "-")
        + row.probe
        + "".join(f"@{i}" for i in row.iteration)
        + (f"#{row.again}" if row.again > 1 else "")
        + marks[row.kind]
        for row in rows
    )


def check(name, tmp_path):
    """Compares outputs with those without probes, and each row with the value that was kept."""
    function, expected = PROGRAMS[name]
    outputs = jax.jit(functools.partial(function, unmonitored))(W, X)
    probed = functools.partial(function, monitor)
    for keep_values in (False, True):
        ours, record = jax.jit(recorded(probed, keep_values=keep_values))(W, X)
        assert same(ours, outputs)
        rows = rows_of(tmp_path / str(keep_values), record)
        assert labels(rows) == expected
    for value, row in zip(record.values, rows, strict=True):
        assert value.shape == row.shape
        if row.fingerprint:
            assert hexadecimal(fingerprint_of(value)) == row.fingerprint


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_changes_and_the_rows_are_those_due(name, tmp_path):
    check(name, tmp_path)


@pytest.fixture
def remat3():
    """Has `jax.checkpoint` as it will be by default in a later jax."""
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", False)


@pytest.mark.parametrize(
    "name", [name for name in PROGRAMS if "remat" in name] + ["everything"]
)
def test_the_next_remat(remat3, name, tmp_path):
    check(name, tmp_path)


@pytest.mark.parametrize("name", ["grad", "vmap", "jit", "scan", "remat"])
def test_without_recording_there_is_nothing_left_of_a_probe(name):
    def text(m):
        return jax.jit(functools.partial(PROGRAMS[name][0], m)).lower(W, X).as_text()

    assert text(monitor) == text(unmonitored)


def test_eagerly_as_well():
    step = jax.jit(jax.grad(functools.partial(vmapped, monitor)))
    (gradient, one), (_, other) = recorded(step)(W, X), recorded(step)(W, X)
    assert bits(gradient) == bits(step(W, X))
    assert bits(one.fingerprints) == bits(other.fingerprints)
    assert bits(monitor(W, "w")) == bits(W)


def test_nothing_leaves_the_device_but_eight_bytes_a_row():
    def step(w, x):
        return jax.value_and_grad(functools.partial(in_everything, monitor))(w, x)

    program = jax.jit(recorded(step)).lower(W, X).compile()
    assert "callback" not in str(program.as_text())
    outputs = [shape.size * shape.dtype.itemsize for shape in jax.tree.leaves(program.out_info)]
    assert outputs == [4, W.nbytes, 8 * 10]


def in_while(x):
    return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: monitor(c + 1, "c"), x)


def in_solve(x):
    def double(v):
        return monitor(2 * v, "c")

    return lax.custom_linear_solve(double, x, lambda _, b: b / 2, symmetric=True)


@pytest.mark.parametrize(
    ("function", "says"),
    [(in_while, "'c'.* in a 'while'.*use lax.scan"), (in_solve, "'c'.*'custom_linear_solve'")],
)
def test_where_it_cannot_be_recorded_is_an_error(function, says):
    with pytest.raises(NotImplementedError, match=says):
        recorded(function)(X)
    jax.jit(function)(X)


def test_inside_a_derivative_it_is_an_error():
    step = recorded(lambda w: jnp.sum(monitor(w, "w")))
    with pytest.raises(ValueError, match="cotangent of 'w'.*jax.jit\\(recorded\\(step\\)\\)"):
        jax.grad(step, has_aux=True)(W)
