"""Sharding over another number of devices does not change the rows of a run.

Runs in a process of its own, because the number of CPU devices is fixed when JAX starts.
"""

from tests.processes import on_devices

SCRIPT = """
import math, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from eqx_norm.determinism import Ledger, hexadecimal, fingerprint, monitor, recorded
from eqx_norm.determinism import read, recorded_into

# Sums and products of small integers are exact in any order: whatever differs is the probe's.
X = jnp.asarray(np.random.RandomState(0).randint(-4, 5, (8, 4, 6)), jnp.float32)
W = jnp.asarray(np.random.RandomState(1).randint(-2, 3, (6, 6)), jnp.float32)

def loss(x, w, total=lambda s: s):
    w = monitor(w, "w")
    def one(x):
        return jnp.sum((1 + monitor(jnp.maximum(monitor(x @ w, "h"), 0), "y")) ** 2)
    # The batch axis is the second that vmap sees.
    examples = jax.vmap(one, in_axes=1)(jnp.swapaxes(x, 0, 1))
    return total(jnp.sum(monitor(examples, "examples")))

def devices(n, kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:n]), ("d",), axis_types=(kind,))

def rows(step, *arrays):
    (value, gradient), record = jax.jit(recorded(step))(*arrays)
    given = [hexadecimal(pair) for pair in record.fingerprints]
    if n == 8:
        with Ledger(sys.argv[1] + "/" + str(len(found))) as ledger:
            out = jax.jit(recorded_into(ledger, step))(0, *arrays)
        np.testing.assert_array_equal(out[1], gradient)
        assert given == [row.fingerprint for row in read(ledger.path).rows]
    return given

found = {}
for n in (1, 2, 8):
    mesh = devices(n)
    step = jax.value_and_grad(loss, argnums=1)
    for spec in (P("d"), P(None, None, "d") if n == 2 else P())[n == 1 :]:
        sharding = NamedSharding(mesh, spec)
        weights = NamedSharding(mesh, P(None, "d") if n == 2 else P())
        arrays = jax.device_put(X, sharding), jax.device_put(W, weights)
        found["auto", n, spec] = rows(step, *arrays)
    for axes in ("d", ("a", "b")) if n > 2 else ("d",):
        if axes != "d":
            mesh = Mesh(np.array(jax.devices()[:n]).reshape(2, -1), axes)
        def parts(x, w):
            return loss(x, w, lambda s: jax.lax.psum(s, axes))
        mapped = jax.shard_map(parts, mesh=mesh, in_specs=(P(axes), P()), out_specs=P())
        found["shard_map", n, axes] = rows(jax.value_and_grad(mapped, argnums=1), X, W)

one = found["auto", 1, P()]
assert len(set(one)) == len(one) == 8, one
for how, given in found.items():
    assert given == one, (how, given, one)

# A mesh of explicit axes; and values that one device holds while another does not.
mesh = devices(8, AxisType.Explicit)
with jax.set_mesh(mesh):
    x = jax.device_put(X, NamedSharding(mesh, P("d")))
    _, record = jax.jit(recorded(lambda x: monitor(2 * x, "x")))(x)
    assert hexadecimal(record.fingerprints[0]) == hexadecimal(fingerprint(2 * X))

# Sharded arrays stay where they are: nothing but the sums of rows is communicated.
mesh = devices(8)
for shape in ((8, 3, 128), (8, 3, 2, 128)):
    for spec in (P("d"), P(*[None] * (len(shape) - 1), "d")):
        x = jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))
        text = jax.jit(fingerprint).lower(x).compile().as_text()
        arrays = [part.split(",") for part in re.findall(r"\\[(\\d[\\d,]*)\\]", text)]
        assert max(math.prod(map(int, array)) for array in arrays) == x.size // 8, text
print("done", len(found))
"""


def test_rows_do_not_depend_on_the_number_of_devices(tmp_path):
    assert on_devices(8, "-c", SCRIPT, str(tmp_path)).stdout == "done 9\n"
