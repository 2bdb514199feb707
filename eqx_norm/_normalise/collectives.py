"""Gathers and sums over named axes, of which `vmap` maps some and a mesh has the others.

Over a mesh (`shard_map`, `pmap`) only vectors travel, one number per channel, by JAX's own
collectives. Those refuse the axes of a `vmap` inside a `shard_map` that checks what varies over
the mesh (`check_vma=True`, the default; seen with jax 0.10.2 and 0.12.0.1). Over such an axis
nothing has to travel: `GATHER` only ends the mapping, and `TOTAL` is a sum.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching
from jaxtyping import Array

AxisName = Hashable | tuple[Hashable, ...]
# Merges vectors that have an axis of devices in front, to vectors.
Merge = Callable[[Sequence[Array]], Sequence[Array]]
# From so many devices on, each merges its share of the channels.
_MANY = 9


def split_names(axis_name: AxisName) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
    """Returns the names of mapped axes, and those of axes of a mesh, in their order."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    vmapped = tuple(name for name in names if name not in manual)
    return vmapped, tuple(name for name in names if name in manual)


def gather(array: Array, vmapped: Sequence[Hashable]) -> Array:
    """Returns the array of all examples, along the first axis, which has size 1 in each."""
    for name in vmapped:
        array = GATHER.bind(array, name=name, size=lax.axis_size(name))
    return array


def total(arrays: Sequence[Array], axis_name: AxisName) -> Sequence[Array]:
    """Returns one sum each, over the examples and then over the devices.

    In this order a gradient is summed over a device's examples before it travels, too.
    """
    vmapped, mesh = split_names(axis_name)
    for name in vmapped:
        arrays = [TOTAL.bind(array, name=name, size=lax.axis_size(name)) for array in arrays]
    if mesh:
        both = varying([jnp.stack(arrays)], frozenset(mesh))[0]
        arrays = list(lax.psum(both, mesh))
    return arrays


def merged(vectors: Sequence[Array], name: Hashable, merge: Merge) -> Sequence[Array]:
    """Returns `merge` of the vectors of all devices along a mesh axis, in the devices' order.

    A few devices fetch the vectors of all others, and each merges them all. Of many devices
    each merges a share of the channels for all, so that what travels does not grow with their
    number D: 2 (D - 1) / D times a device's vectors, rather than D - 1 times.
    """
    own, devices = jnp.stack(varying(vectors, frozenset([name]))), lax.axis_size(name)
    if devices < _MANY:
        return merge(list(jnp.moveaxis(lax.all_gather(own, name, to="invarying"), 1, 0)))
    *_, channels = own.shape
    share = -(-channels // devices)
    shares = jnp.pad(own, [(0, 0)] * (own.ndim - 1) + [(0, share * devices - channels)])
    shares = jnp.moveaxis(shares.reshape(*own.shape[:-1], devices, share), -2, 0)
    shares = lax.all_to_all(shares, name, split_axis=0, concat_axis=0)
    mine = jnp.stack(merge(list(jnp.moveaxis(shares, 1, 0))))
    whole = lax.all_gather(mine, name, axis=mine.ndim - 1, tiled=True, to="invarying")
    return list(whole[..., :channels])


def varying(arrays: Sequence[Array], axes: frozenset[Any] = frozenset()) -> list[Array]:
    """Returns the arrays, all of which vary over the axes of a mesh over which any does, and
    over `axes`.

    As for JAX's own primitives: inside `shard_map`, the type of an array says whether it may
    differ from device to device, and the transpose of "may differ from now on" is a sum over
    the devices. An array which is made on the way, of zeros for example, has a type of its own.
    Vectors of one shape get their type together, so that they are one sum.
    """
    own = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    axes = axes.union(*own)
    alike: dict[Any, list[int]] = {}
    for i, (array, over) in enumerate(zip(arrays, own, strict=True)):
        alike.setdefault((array.shape, array.dtype, over), []).append(i)
    cast = list(arrays)
    for (*_, over), places in alike.items():
        if over != axes:
            together = jnp.stack([arrays[i] for i in places])
            together = lax.pcast(together, tuple(axes - over), to="varying")
            for i, array in zip(places, together, strict=True):
                cast[i] = array
    return cast


# --- Over the axis of a `vmap`.


def _unbound(*_: Any, name: Hashable, **__: Any) -> Any:
    raise NameError(f"unbound axis name: {name}")


def _gather_shape(array: Any, *, name: Hashable, size: int) -> Any:
    del name
    return array.update(shape=(size * array.shape[0], *array.shape[1:]))


def _gather_batch(
    axis: Any, arrays: Any, mapped: Any, *, name: Hashable, size: int
) -> tuple[Array, int | None]:
    (array,), (place,) = arrays, mapped
    if axis.name == name:
        if place is None:
            array, place = jnp.broadcast_to(array[None], (size, *array.shape)), 0
        return lax.collapse(jnp.moveaxis(array, place, 0), 0, 2), None
    if place is None:
        return GATHER.bind(array, name=name, size=size), None
    # The axis to gather is in front, and the mapped one behind it.
    array = GATHER.bind(jnp.moveaxis(array, place, 1), name=name, size=size)
    return array, 1


def _total_batch(
    axis: Any, arrays: Any, mapped: Any, *, name: Hashable, size: int
) -> tuple[Array, int | None]:
    (array,), (place,) = arrays, mapped
    if axis.name == name:
        return (array * size if place is None else array.sum(place)), None
    return TOTAL.bind(array, name=name, size=size), place


# The arrays of all examples, along the first axis.
GATHER = Primitive("eqx_norm_gather")
GATHER.def_impl(_unbound)
GATHER.def_abstract_eval(_gather_shape)
batching.fancy_primitive_batchers[GATHER] = _gather_batch

# The sum over all examples: its own transpose, for which each example has a cotangent.
TOTAL = Primitive("eqx_norm_total")
TOTAL.def_impl(_unbound)
TOTAL.def_abstract_eval(lambda array, *, name, size: array)
batching.fancy_primitive_batchers[TOTAL] = _total_batch
