"""Tests a batch over several devices: a vmapped axis and a mesh's, or a mesh's alone.

Runs in a process of its own, because the number of CPU devices is fixed when JAX starts.
"""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from eqx_norm._normalise.arithmetic import Arithmetic
from eqx_norm._normalise.primitives import AFFINE, Static
from tests.compiling import XLA_FLAGS
from tests.processes import on_devices

from . import over_mesh

SCRIPT = """
import sys
import jax, equinox as eqx, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from eqx_norm import BatchNorm

def over_batch(layer):
    return jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))

def gradient(f, x, state):
    return jax.grad(lambda x: (f(x, state)[0] ** 3).sum())(x)

mesh = Mesh(np.array(jax.devices()), ("devices",))
make = eqx.nn.make_with_state(BatchNorm)
x = 5 + 2 * jax.random.normal(jax.random.key(0), (8, 3, 5))

def check(names, approach, how):
    one, state = make(3, "batch", approach=approach)
    right = jax.jit(over_batch(one))
    if how == "auto":
        sharded, xs = right, jax.device_put(x, NamedSharding(mesh, P("devices")))
    else:
        layer, _ = make(3, names.split("+"), approach=approach)
        specs = dict(in_specs=(P("devices"), P()), out_specs=(P("devices"), P()))
        f = jax.shard_map(over_batch(layer), mesh=mesh, check_vma=how == "check_vma", **specs)
        sharded, xs = jax.jit(f), x
        if how == "shard_map":
            program = sharded.lower(xs, state).compile().as_text()
            assert program.count(" all-gather(") == 1 and " all-reduce(" not in program, program
    ours = sharded(xs, state), gradient(sharded, xs, state)
    theirs = right(x, state), gradient(right, x, state)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, err_msg=f"{names}, {approach}, {how}")

for case in sys.argv[1:]:
    check(*case.split(","))
"""


def test_equals_one_device():
    cases = "batch+devices,batch,shard_map", "devices+batch,smooth_start,shard_map"
    on_devices(2, "-c", SCRIPT, *cases, "batch,ema,auto", flags=XLA_FLAGS)


def test_with_check_vma_a_sentence_says_what_to_do():
    result = on_devices(2, "-c", SCRIPT, "batch+devices,batch,check_vma", fails=True)
    assert "jax.shard_map(..., check_vma=False) around this layer" in result.stderr


@pytest.fixture(scope="module")
def errors():
    return json.loads(on_devices(8, "-m", "tests.operation.over_mesh", flags=XLA_FLAGS).stdout)


@pytest.mark.parametrize("name", over_mesh.CASES)
def test_derivatives_are_those_of_one_device_where_jax_checks_what_varies(errors, name):
    """Tests `check_vma=True`, which is the default, in and around the `shard_map`."""
    assert {way for way in errors[name] if way.startswith("gradient, ")} == {
        "gradient, outside",
        "gradient, inside",
    }
    # What the tests are after is off by the number of devices.
    assert not {way: error for way, error in errors[name].items() if not error < 1e-4}


def test_a_primitive_that_cannot_keep_track_raises():
    def mixed(x, weight):
        static = Static(1, Arithmetic())
        return AFFINE.bind(weight, weight, x, weight, weight, static=static)[0]

    mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(
        mixed, mesh=mesh, in_specs=(P("devices"), P()), out_specs=P("devices")
    )
    with pytest.raises(TypeError, match="eqx_norm_affine was given arrays that vary over diff"):
        split(jnp.ones((1, 2, 3)), jnp.ones((1, 2, 1)))
