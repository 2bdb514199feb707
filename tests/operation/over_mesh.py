"""Tests derivatives over the axis of a mesh, by those of one device.

Run by test_devices.py, in a process that has 8 devices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eqx_norm import LayerNorm
from eqx_norm._normalise import elementwise, primitives
from eqx_norm._normalise.primitives import Static, bind
from tests.compiling import jit
from tests.helpers import f32, make, over_batch

from .derivatives import (
    directional,
    gradient,
    gradient_of_gradient,
    linearized,
    slope_of_gradient,
)

DEVICES = 8
N, C, L = 16, 2, 3
WHOLE, SPLIT = P(), P("devices")
RANDOM = np.random.default_rng(0)


class Case(NamedTuple):
    """Holds a function to call on all examples, or inside `shard_map` on those of a device."""

    f: Callable[..., Any]
    arrays: tuple[jax.Array, ...]
    out: P = SPLIT  # WHOLE where `f` sums over examples, and so over devices

    @property
    def specs(self) -> tuple[P, ...]:
        """Returns that examples are split over devices, and vectors the same on all."""
        return tuple(SPLIT if array.shape[:1] == (N,) else WHOLE for array in self.arrays)


def normal(*shape):
    return f32(RANDOM.standard_normal(shape))


def silu_and_more(u):
    return jax.nn.silu(u) + jnp.cos(u)


def of_primitives():
    """Returns each pass over x, in all its operands; vectors are the same on all devices."""
    full, column = (N, C, L), (1, C, 1)
    g, x = normal(*full), normal(*full)
    mean, mean_rest, a, b = (normal(*column) for _ in range(4))
    static = Static(2, C)
    inner = a, b, x, mean, mean_rest

    def sums(*arrays):
        return bind(primitives.SUMS, *arrays, static=static, shape=column, both=True)

    def affine(a, b, x, *mean):
        return bind(primitives.AFFINE, a, b, x, x, *mean, static=static)

    def activated(a, b, x, *mean):
        return elementwise.activated(silu_and_more, static, [a, b, *mean], x, x, None)

    return {
        "sums": Case(sums, (g, x, mean, mean_rest), WHOLE),
        "affine": Case(affine, inner),
        "activated": Case(activated, inner),
    }


def of_layers():
    """Returns layers: x is split over devices, weight and bias are the same on all."""

    def case(layer, x, call):
        arrays, restore = jax.tree.flatten(eqx.filter(layer, eqx.is_inexact_array))

        def f(x, *arrays):
            model = eqx.combine(jax.tree.unflatten(restore, arrays), layer)
            return jax.vmap(functools.partial(call, model))(x)

        return Case(f, (x, *(a + 0.1 * normal(*a.shape) for a in arrays)))

    def layer_norm(dtype=jnp.float32, **arguments):
        x = normal(N, 5).astype(dtype)
        return case(LayerNorm(5, **arguments), x, lambda layer, x: layer(x))

    def batch_norm(dtype=jnp.float32, mask=None, **arguments):
        layer, state = make(C, "batch", approach="batch", inference=True, **arguments)
        state = jax.tree.map(lambda a: a + 0.5, state)
        x = normal(N, C, L).astype(dtype)
        return case(layer, x, lambda layer, x: layer(x, state, mask=mask)[0])

    def training(approach, mask=None, **arguments):
        def f(x, weight, bias):
            names = ("batch", *jax.sharding.get_abstract_mesh().manual_axes)
            layer, state = make(C, names, approach=approach, **arguments)
            model = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
            return over_batch(lambda x, state: model(x, state, mask=mask))(x, state)[0]

        return Case(f, (normal(N, C, L), normal(C), normal(C)))

    return {
        "LayerNorm": layer_norm(),
        "LayerNorm, no bias": layer_norm(use_bias=False),
        "LayerNorm, no weight": layer_norm(use_weight=False, use_bias=False),
        "LayerNorm, PReLU": layer_norm(activation=eqx.nn.PReLU(0.3)),
        "LayerNorm, bfloat16, silu": layer_norm(jnp.bfloat16, activation=jax.nn.silu),
        "inference": batch_norm(),
        "inference, PReLU": batch_norm(activation=eqx.nn.PReLU(0.3)),
        "inference, mask": batch_norm(mask=jnp.array([True, False, True])),
        "inference, bfloat16, silu": batch_norm(jnp.bfloat16, activation=jax.nn.silu),
        "training": training("smooth_start"),
        "training, silu": training("batch", activation=jax.nn.silu),
        "training, PReLU, mask": training(
            "variance_clip", jnp.array([True, False, True]), activation=eqx.nn.PReLU(0.3)
        ),
    }


CASES = of_primitives() | of_layers()
# A gradient of what are sums over devices already counts once on each device.
INSIDE = gradient, directional, linearized, slope_of_gradient
TRANSFORMS = (*INSIDE, gradient_of_gradient)


def mesh(devices=DEVICES):
    return jax.make_mesh((devices,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))


def error(ours, right):
    """Returns the largest error, in units of the largest value."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True)
    return max(
        float(
            np.max(np.abs(np.subtract(a, b, dtype=np.float64))) / np.max(np.abs(b), initial=1)
        )
        for a, b in pairs
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_derivatives_are_those_of_one_device_where_jax_checks_what_varies(case):
    """Tests `check_vma=True`, which is the default, in and around the `shard_map`."""
    tangents = tuple(normal(*a.shape).astype(a.dtype) for a in case.arrays)

    def local(*arrays):
        y = case.f(*arrays)
        return jax.lax.psum(y, "devices") if case.out == WHOLE else y

    def every(transforms, f, arrays, tangents):
        return [transform(f, arrays, tangents) for transform in transforms]

    around = jax.shard_map(local, mesh=mesh(), in_specs=case.specs, out_specs=case.out)
    inside = jax.shard_map(
        functools.partial(every, INSIDE, local),
        mesh=mesh(),
        in_specs=(case.specs, case.specs),
        out_specs=[case.specs, case.out, (case.out, case.out, case.specs), case.specs],
    )
    one, over_mesh, on_each = (
        jit(f)(case.arrays, tangents)
        for f in (
            functools.partial(every, TRANSFORMS, case.f),
            functools.partial(every, TRANSFORMS, around),
            inside,
        )
    )
    # What the test is after is off by the number of devices.
    for found in (over_mesh, on_each):
        for transform, ours, right in zip(TRANSFORMS, found, one, strict=False):
            assert error(ours, right) < 1e-4, transform.__name__
