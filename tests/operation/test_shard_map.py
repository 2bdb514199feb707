"""Tests derivatives and batches over several devices, of a mesh's axis and a vmapped one.

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

from .over_mesh import CASES, INSIDE, TRAINING, TRANSFORMS


@pytest.fixture(scope="module")
def found():
    return json.loads(on_devices(8, "-m", "tests.operation.over_mesh", flags=XLA_FLAGS).stdout)


@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_those_of_one_device_where_jax_checks_what_varies(found, name):
    """Tests `check_vma=True`, which is the default, in and around the `shard_map`."""
    assert len(found[name]) == len(TRANSFORMS) + len(INSIDE)
    # What the tests are after is off by the number of devices.
    assert not {way: error for way, error in found[name].items() if not error < 1e-4}


@pytest.mark.parametrize("name", TRAINING)
def test_a_batch_over_devices_equals_one_device(found, name):
    assert max(found[name].values()) < 2e-6


def test_with_check_vma_a_sentence_says_what_to_do(found):
    assert "jax.shard_map(..., check_vma=False) around this layer" in found["with check_vma"]


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
