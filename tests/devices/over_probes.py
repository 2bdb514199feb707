"""Tests that fingerprints and records do not depend on how arrays are split over devices.

Run by test_devices.py, in a process with eight devices.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eqx_norm.determinism import fingerprint, monitor, recorded

from .ways import mesh_of

pytestmark = pytest.mark.long

# Sums and products of small integers are exact in any order: differences come from the probe.
X = jnp.asarray(np.random.RandomState(0).randint(-4, 5, (8, 8, 8)), jnp.float32)
W = jnp.asarray(np.random.RandomState(1).randint(-2, 3, (8, 8)), jnp.float32)


def loss(x, w, summed=lambda loss: loss):
    w = monitor(w, "w")

    def one(x):
        return jnp.sum((1 + monitor(jnp.maximum(monitor(x @ w, "h"), 0), "y")) ** 2)

    # The batch axis is the second that vmap sees.
    examples = jax.vmap(one, in_axes=1)(jnp.swapaxes(x, 0, 1))
    return summed(jnp.sum(monitor(examples, "examples")))


def rows(loss, *arrays, **options):
    """Returns the rows of a gradient; those of its values are the values' fingerprints."""
    _, record = jax.jit(recorded(jax.value_and_grad(loss, argnums=1), **options))(*arrays)
    for row, value in zip(record.fingerprints, record.values, strict=bool(record.values)):
        assert (row == fingerprint(value)).all()
    return np.asarray(record.fingerprints).tolist()


@pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 8}, {"a": 2, "b": 4}], ids=str)
def test_rows_do_not_depend_on_the_number_of_devices(sizes):
    one, mesh, axes = rows(loss, X, W), mesh_of(**sizes), tuple(sizes)
    assert len(set(map(tuple, one))) == len(one) == 8
    for x, w in ((P(axes), P()), (P(), P()), (P(None, None, "a"), P(None, "a"))):
        put = map(jax.device_put, (X, W), (NamedSharding(mesh, x), NamedSharding(mesh, w)))
        assert rows(loss, *put) == one

    def parts(x, w):
        return loss(x, w, lambda loss: jax.lax.psum(loss, axes))

    mapped = jax.shard_map(parts, mesh=mesh, in_specs=(P(axes), P()), out_specs=P())
    assert rows(mapped, X, W, keep_values="b" in axes) == one


def test_explicit_axes_keep_values_and_shardings():
    mesh = mesh_of(AxisType.Explicit, d=8)
    with jax.set_mesh(mesh):
        x, one = jax.device_put(X, P("d")), lambda x: monitor(x, "x")
        for f in (one, jax.shard_map(one, in_specs=P("d"), out_specs=P("d"))):
            y, record = jax.jit(recorded(f, keep_values=True))(x)
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("d")), 3)
            assert (record.values[0] == X).all()
            assert (record.fingerprints[0] == fingerprint(X)).all()


def test_the_shardings_of_an_inner_jit_are_kept():
    split = NamedSharding(mesh_of(d=8), P(None, "d"))
    y, _ = recorded(jax.jit(lambda x: monitor(x, "x"), out_shardings=split))(X)
    assert y.sharding.is_equivalent_to(split, 3)


@pytest.mark.parametrize("spec", [P("d"), P(None, None, None, "d")], ids=str)
def test_only_the_sums_of_rows_are_sent_between_devices(spec):
    x = jax.device_put(jnp.ones((8, 3, 2, 128)), NamedSharding(mesh_of(d=8), spec))
    text = jax.jit(fingerprint).lower(x).compile().as_text() or ""
    arrays = [part.split(",") for part in re.findall(r"\[(\d[\d,]*)\]", text)]
    assert max(math.prod(map(int, array)) for array in arrays) == x.size // 8
