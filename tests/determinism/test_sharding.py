"""Tests that the rows of a run do not depend on the number of devices."""

import pytest

from tests.processes import on_devices

SCRIPT = """
import math, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from eqx_norm.determinism import fingerprint, monitor, recorded

# Sums and products of small integers are exact in any order: differences come from the probe.
X = jnp.asarray(np.random.RandomState(0).randint(-4, 5, (8, 8, 8)), jnp.float32)
W = jnp.asarray(np.random.RandomState(1).randint(-2, 3, (8, 8)), jnp.float32)

def loss(x, w, total=lambda s: s):
    w = monitor(w, "w")
    def one(x):
        return jnp.sum((1 + monitor(jnp.maximum(monitor(x @ w, "h"), 0), "y")) ** 2)
    # The batch axis is the second that vmap sees.
    examples = jax.vmap(one, in_axes=1)(jnp.swapaxes(x, 0, 1))
    return total(jnp.sum(monitor(examples, "examples")))

def rows(loss, *arrays, **options):
    step = jax.value_and_grad(loss, argnums=1)
    _, record = jax.jit(recorded(step, **options))(*arrays)
    for row, value in zip(record.fingerprints, record.values):
        assert (row == fingerprint(value)).all()
    return np.asarray(record.fingerprints).tolist()

one = rows(loss, X, W)
assert len(set(map(tuple, one))) == len(one) == 8, one
devices = np.array(jax.devices())
for shape, axes in (((2,), ("a",)), ((8,), ("a",)), ((2, 4), ("a", "b"))):
    mesh = Mesh(devices[: math.prod(shape)].reshape(shape), axes)
    for x, w in ((P(axes), P()), (P(), P()), (P(None, None, "a"), P(None, "a"))):
        put = map(jax.device_put, (X, W), (NamedSharding(mesh, x), NamedSharding(mesh, w)))
        assert rows(loss, *put) == one, (mesh, x, w)
    def parts(x, w):
        return loss(x, w, lambda s: jax.lax.psum(s, axes))
    mapped = jax.shard_map(parts, mesh=mesh, in_specs=(P(axes), P()), out_specs=P())
    assert rows(mapped, X, W, keep_values="b" in axes) == one, mesh

# Also on a mesh of explicit axes: values of the parts are concatenated, shardings are kept.
mesh = Mesh(devices, ("d",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(mesh):
    x, one = jax.device_put(X, P("d")), lambda x: monitor(x, "x")
    for f in (one, jax.shard_map(one, in_specs=P("d"), out_specs=P("d"))):
        y, record = jax.jit(recorded(f, keep_values=True))(x)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("d")), 3)
        assert (record.values[0] == X).all()
        assert (record.fingerprints[0] == fingerprint(X)).all()

# The shardings of a `jit` inside are kept, too.
split = NamedSharding(Mesh(devices, "d"), P(None, "d"))
y, _ = recorded(jax.jit(lambda x: monitor(x, "x"), out_shardings=split))(X)
assert y.sharding.is_equivalent_to(split, 3)

# Sharded arrays stay where they are: only the sums of rows are communicated.
for spec in (P("d"), P(None, None, None, "d")):
    x = jax.device_put(jnp.ones((8, 3, 2, 128)), NamedSharding(Mesh(devices, "d"), spec))
    text = jax.jit(fingerprint).lower(x).compile().as_text()
    arrays = [part.split(",") for part in re.findall(r"\\[(\\d[\\d,]*)\\]", text)]
    assert max(math.prod(map(int, array)) for array in arrays) == x.size // 8, text
"""


@pytest.mark.long
def test_rows_do_not_depend_on_the_number_of_devices():
    on_devices(8, "-c", SCRIPT)
