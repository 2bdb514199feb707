"""Lists all norms, each with a constructor, a call for a batch, and an exact reference."""

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
    call: Any = None  # for a batch; `None` maps the layer over examples


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
NAMES = [*NORMS]
EXAMPLE_NORMS = [name for name in NORMS if name != "BatchNorm"]
each_norm = pytest.mark.parametrize("name", NAMES)
each_example_norm = pytest.mark.parametrize("name", EXAMPLE_NORMS)


def made(name, shape, **options):
    """Returns a layer, and `call(layer, x, mask=None)`, which maps it over a batch and returns
    y and the new state, which is `None` for a norm of one example."""
    layer, mapped = NORMS[name].make(shape, **options), NORMS[name].call or over_examples
    if name != "BatchNorm":
        return layer, lambda layer, x, mask=None: (mapped(layer, x, mask), None)
    layer, state = layer

    def call(layer, x, mask=None):
        def one(x, mask):
            return layer(x, copy(state), mask=mask)

        return jax.vmap(one, axis_name="batch", out_axes=(0, None))(x, mask)

    return layer, call


def over_examples(layer, x, mask=None):
    return jax.vmap(lambda x, mask: layer(x, mask=mask))(x, mask)


def mask_shape(name, shape):
    """Returns the shape of a mask of a batch of this shape. A split norm along the channels
    takes the mask of each part from the first channel of the part."""
    kind, *how = name.split(", ")
    of_values = kind in ("LayerNorm", "RMSNorm") and how != ["axis=0"]
    return shape if of_values else shape[:1] + shape[2:]


def moved(layer):
    """Returns the layer with randomly changed weight and bias."""
    random = np.random.RandomState(3)

    def move(leaf):
        return leaf + jnp.asarray(random.uniform(-0.5, 0.5, leaf.shape), leaf.dtype)

    return jax.tree.map(lambda leaf: move(leaf) if eqx.is_array(leaf) else leaf, layer)


def with_parameters(layer, weight, bias):
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))


# --- Norms of examples in parts along a mapped axis. Parts are blocks of the first axis of an
# example, or of the second axis for norms with channels.

PARTS = 2


def split(name):
    """Returns the norm of examples in parts, whose layer has the weights of all parts."""
    has_channels = name in ("GroupNorm", "InstanceNorm")
    axis = 1 + has_channels  # of a batch
    axes: Any = None if has_channels else 0, axis, 1  # of a layer, a batch and its mask

    def make(shape, **options):
        sizes = [n // PARTS if i == axis else n for i, n in enumerate(shape, 1)]
        whole, part = (
            NORMS[name].make(shape),
            NORMS[name].make(sizes, axis_name="part", **options),
        )
        return with_parameters(part, whole.weight, whole.bias)

    def one_part(layer, x, mask):
        # Each part has a mask of its own positions.
        if mask is not None and "axis=0" in name:
            mask = mask[:, 0]
        return over_examples(layer, x, mask)

    def over_parts(layer, x, mask=None):
        arrays = (in_parts(*pair) for pair in zip((layer, x, mask), axes, strict=True))
        in_axes = eqx.if_array(axes[0]), 0, 0
        y = eqx.filter_vmap(one_part, in_axes=in_axes, axis_name="part")(*arrays)
        return jnp.concatenate(y, axis)

    return Norm(make, NORMS[name].exact, over_parts)


def in_parts(tree, axis):
    """Splits arrays into parts along an axis, and stacks the parts; `None`: no split."""
    if axis is None:
        return tree
    arrays, static = eqx.partition(tree, eqx.is_array)
    cut = jax.tree.map(lambda array: jnp.stack(jnp.split(array, PARTS, axis)), arrays)
    return eqx.combine(cut, static)


NORMS |= {f"{name}, split": split(name) for name in EXAMPLE_NORMS}
