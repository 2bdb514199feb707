"""Tests the derivatives of passes and layers in and around `jax.shard_map`.

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
    # What the tests are after is off by the number of devices. Rounded to bfloat16, a number
    # is off by 2^-9.
    bound = 2**-9 if "bfloat16" in name else 1e-4
    assert not {way: error for way, error in errors[name].items() if not error < bound}


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
