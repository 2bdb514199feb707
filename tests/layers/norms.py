"""Lists all norms, each with a constructor, a call for a batch, and an exact reference."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import pytest

from eqx_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from experiments.common import exact
from tests.helpers import array, copy, make

GROUPS = 3


class Norm(NamedTuple):
    """Describes a norm; `make(shape, **options)` returns a layer for examples of that shape."""

    make: Callable[..., Any]
    exact: Callable[..., exact.Exact]


def along_channels(kind):
    return lambda shape, **options: kind(shape[0], axis=0, **options)


def batch_norm(shape, approach="batch", **options):
    return make(shape[0], "batch", approach=approach, **options)


def group_norm(shape, **options):
    return GroupNorm(GROUPS, shape[0], **options)


def instance_norm(shape, **options):
    return InstanceNorm(shape[0], affine=True, **options)


def exact_instance_norm(batch, mask=None):
    return exact.group_norm(batch, batch.x.shape[1], mask)


NORMS = {
    "BatchNorm": Norm(batch_norm, exact.batch_norm),
    "LayerNorm": Norm(LayerNorm, exact.layer_norm),
    "RMSNorm": Norm(RMSNorm, functools.partial(exact.layer_norm, centred=False)),
    "LayerNorm, axis=0": Norm(along_channels(LayerNorm), exact.channel_norm),
    "RMSNorm, axis=0": Norm(
        along_channels(RMSNorm), functools.partial(exact.channel_norm, centred=False)
    ),
    "GroupNorm": Norm(group_norm, functools.partial(exact.group_norm, groups=GROUPS)),
    "InstanceNorm": Norm(instance_norm, exact_instance_norm),
}
NAMES = [*NORMS]
EXAMPLE_NORMS = [name for name in NORMS if name != "BatchNorm"]
each_norm = pytest.mark.parametrize("name", NAMES)
each_example_norm = pytest.mark.parametrize("name", EXAMPLE_NORMS)
# A norm of channels over a batch, of values, of positions, and of channels in groups.
each_layout = pytest.mark.parametrize(
    "name", ["BatchNorm", "LayerNorm", "LayerNorm, axis=0", "GroupNorm"]
)


def made(name, shape, **options):
    """Returns a layer, and `call(layer, x, mask=None, **weights)`, which maps it over a batch
    and returns y and the new state, which is `None` for a norm of one example."""
    layer = NORMS[name].make(shape, **options)
    if name != "BatchNorm":
        return layer, lambda *arrays, **weights: (over_examples(*arrays, **weights), None)
    layer, state = layer

    def call(layer, x, mask=None, **weights):
        def one(x, mask, weights):
            return layer(x, copy(state), mask=mask, **weights)

        return jax.vmap(one, axis_name="batch", out_axes=(0, None))(x, mask, weights)

    return layer, call


def over_examples(layer, x, mask=None, **weights):
    def one(x, mask, weights):
        return layer(x, mask=mask, **weights)

    return jax.vmap(one)(x, mask, weights)


def mask_shape(name, shape):
    """Returns the shape of a mask of a batch of this shape."""
    return shape if name in ("LayerNorm", "RMSNorm") else shape[:1] + shape[2:]


def moved(layer):
    """Returns the layer with randomly changed weight and bias."""
    random = np.random.RandomState(3)

    def move(leaf):
        return array(np.asarray(leaf) + random.uniform(-0.5, 0.5, leaf.shape), leaf.dtype)

    return jax.tree.map(lambda leaf: move(leaf) if eqx.is_array(leaf) else leaf, layer)


def with_parameters(layer, weight, bias):
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
