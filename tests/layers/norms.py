"""Lists all norms: how each is made and called for a batch, and its exact reference."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from tests import exact
from tests.helpers import copy, make

GROUPS = 3


class Norm(NamedTuple):
    """Describes a norm; `make(shape, **options)` returns a layer for examples of that shape."""

    make: Callable[..., Any]
    exact: Callable[..., exact.Exact]


def group_norm(shape, **options):
    return GroupNorm(GROUPS, shape[0], **options)


def instance_norm(shape, **options):
    return InstanceNorm(shape[0], affine=True, **options)


def along_channels(kind):
    return lambda shape, **options: kind(shape[0], axis=0, **options)


def exact_instance_norm(batch, mask=None):
    return exact.group_norm(batch, batch.x.shape[1], mask)


NORMS = {
    "BatchNorm": Norm(
        lambda shape, approach="batch", **options: make(
            shape[0], "batch", approach=approach, **options
        ),
        exact.batch_norm,
    ),
    "LayerNorm": Norm(LayerNorm, exact.layer_norm),
    "RMSNorm": Norm(RMSNorm, functools.partial(exact.layer_norm, centred=False)),
    "LayerNorm, axis=0": Norm(along_channels(LayerNorm), exact.channel_norm),
    "RMSNorm, axis=0": Norm(
        along_channels(RMSNorm), functools.partial(exact.channel_norm, centred=False)
    ),
    "GroupNorm": Norm(group_norm, functools.partial(exact.group_norm, groups=GROUPS)),
    "InstanceNorm": Norm(instance_norm, exact_instance_norm),
}
OF_VALUES = "LayerNorm", "RMSNorm"  # whose masks have one bool for each value
EXAMPLE_NORMS = [name for name in NORMS if name != "BatchNorm"]
each_norm = pytest.mark.parametrize("name", NORMS)
each_example_norm = pytest.mark.parametrize("name", EXAMPLE_NORMS)


def made(name, shape, **options):
    """Returns a layer, and `call(layer, x, mask=None)`, which maps it over a batch and returns
    y and the new state; that of a norm of one example is `None`."""
    layer = NORMS[name].make(shape, **options)
    if name != "BatchNorm":
        return layer, lambda layer, x, mask=None: (over_examples(layer, x, mask), None)
    layer, state = layer

    def call(layer, x, mask=None):
        def one(x, mask):
            return layer(x, copy(state), mask=mask)

        return jax.vmap(one, axis_name="batch", out_axes=(0, None))(x, mask)

    return layer, call


def over_examples(layer, x, mask=None):
    return jax.vmap(lambda x, mask: layer(x, mask=mask))(x, mask)


def mask_shape(name, shape):
    """Returns the shape of a mask of a batch with this shape."""
    return shape if name in OF_VALUES else shape[:1] + shape[2:]


def moved(layer):
    """Returns the layer with another weight and bias."""
    random = np.random.RandomState(3)

    def move(leaf):
        return leaf + jnp.asarray(random.uniform(-0.5, 0.5, leaf.shape), leaf.dtype)

    return jax.tree.map(move, layer)


def with_parameters(layer, weight, bias):
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
