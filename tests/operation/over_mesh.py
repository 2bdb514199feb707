"""Tests derivatives over the axis of a mesh of four devices, in and around `shard_map`.

Run by test_derivatives.py, in a process that has them. `check_vma` is true, the default.
"""

import functools

import jax
import pytest
from jax.sharding import PartitionSpec as P

from .cases import LAYERS, PASSES, N
from .derivatives import BASIC, assert_agree, gradient_of_gradient, linearized

MESH = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
CASES = {**PASSES, **LAYERS}
del CASES["moments"]  # alone they are those of each device


def split(array):
    """Returns that examples are split over devices, and vectors the same on all."""
    return P("devices") if array.shape[:1] == (N,) else P()


@pytest.mark.parametrize("name", CASES)
def test_derivatives(name):
    case = CASES[name]
    specs = tuple(map(split, case.operands))
    outputs = jax.tree.map(split, jax.eval_shape(case.formula, *case.operands))

    def local(*operands):
        y = case.f(*operands)
        return y if outputs == P("devices") else jax.lax.psum(y, "devices")

    def inside(transform):
        def mapped(f, *arrays):
            results = jax.eval_shape(functools.partial(transform, case.formula), *arrays)
            return jax.shard_map(
                functools.partial(transform, local),
                mesh=MESH,
                in_specs=(specs, specs),
                out_specs=jax.tree.map(split, results),
            )(*arrays)

        return mapped

    around = jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=outputs)
    transforms = *BASIC, linearized
    # A gradient of what are sums over devices already counts once on each device.
    assert_agree((*transforms, gradient_of_gradient), case._replace(f=around))
    assert_agree(transforms, case, wrap=inside)
