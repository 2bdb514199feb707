"""Wraps interfaces that a release of JAX may change: the context in which a primitive is
lowered, and the types of arrays.

Checked with jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray, max_dim
from jax.interpreters import mlir
from jaxtyping import Array

Context = Any  # in which JAX lowers a primitive
Aval = Any  # the type of an array
Args = Sequence[Any]  # of a primitive's rule, or its results: arrays, types, places, zeros
# For each shape of vectors, the mesh axes that split an axis of x which the vectors sum over.
Over = Sequence[tuple[str, ...]]


class Target(NamedTuple):
    """Describes the program that a pass is lowered for."""

    platform: str  # "cpu", "gpu", or "other"
    platforms: Sequence[str]  # of the whole program
    devices: int  # over which XLA may split arrays
    is_known: bool  # sums are over axes of known sizes, not over symbols of `jax.export`
    # For each shape of vectors, the mesh axes over which to merge what a device sums over its
    # shard of x.
    over: Over = ((), ())

    @property
    def is_partitioned(self) -> bool:
        """Returns whether XLA may split arrays."""
        return self.devices > 1


def operands(context: Context) -> Sequence[Aval]:
    """Returns the types of a primitive's operands."""
    return context.avals_in


def results(context: Context) -> Sequence[Aval]:
    """Returns the types of a primitive's results."""
    return context.avals_out


def platforms(context: Context) -> Sequence[str]:
    """Returns the platforms of the program that a primitive is lowered for."""
    return context.module_context.platforms


def devices(context: Context) -> int:
    """Returns the number of devices over which XLA may split the program: 1 inside `shard_map`,
    unless some axes of its mesh are automatic."""
    axes = context.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return math.prod(
            n for name, n in axes.mesh.shape.items() if name not in axes.manual_axes
        )
    return getattr(axes, "num_devices", None) or 1


def with_mesh(context: Context) -> Context | None:
    """Returns the context with a mesh, as `custom_partitioning` needs, of a program that XLA
    will split. Returns `None` on one device, inside `shard_map`, for `jax.export`, which cannot
    save Python code, and with XLA's older partitioner.

    The mesh has axes of prime sizes, so it describes how arrays are split over any mesh of the
    program whose devices are in this order.
    """
    module = context.module_context
    axes, is_exported = module.axis_context, module.lowering_parameters.for_export
    config: Any = jax.config  # without types
    has_rules = config.jax_use_shardy_partitioner and not is_exported
    if hasattr(axes, "manual_axes") or devices(context) == 1 or not has_rules:
        return None
    meshes = dict.fromkeys(aval.sharding.mesh.axis_sizes for aval in operands(context))
    known = [sizes for sizes in meshes if math.prod(sizes) == axes.num_devices]
    sizes = [prime for size in (*known, (axes.num_devices,))[0] for prime in _primes(size)]
    mesh = jax.sharding.AbstractMesh(tuple(sizes), tuple(f"mesh{i}" for i in range(len(sizes))))
    # Only the mesh's shape is used: any device will do.
    assignment = tuple(jax.local_devices()[:1]) * axes.num_devices
    axes = dataclasses.replace(axes, device_assignment=assignment, abstract_mesh=mesh)
    return context.replace(module_context=module.replace(axis_context=axes))


def _primes(n: int) -> list[int]:
    least = next((p for p in range(2, n + 1) if n % p == 0), None)
    return [] if least is None else [least, *_primes(n // least)]


def without_mesh() -> AbstractContextManager[object]:
    """Returns a context without a mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def automatic_mesh() -> AbstractContextManager[object]:
    """Returns a context in which all explicit axes of the mesh are automatic."""
    mesh = jax.sharding.get_abstract_mesh()
    auto = dict.fromkeys(mesh.explicit_axes, jax.sharding.AxisType.Auto)
    return jax.sharding.use_abstract_mesh(mesh.update_axis_types(auto))


def lowered(function: Callable[..., list[Array]], context: Context, *arrays: Any) -> Args:
    """Returns the results of a function of arrays, lowered for types without a mesh: inside a
    primitive XLA decides how arrays are split."""
    with automatic_mesh():
        plain = [*map(unsplit, operands(context))]
        return mlir.lower_fun(function, True)(context.replace(avals_in=plain), *arrays)


def unsplit(aval: Aval) -> ShapedArray:
    """Returns the type of an array of this shape and dtype, without a mesh."""
    return ShapedArray(aval.shape, aval.dtype)


def changed(aval: Aval, *, split: tuple[Aval, jax.P] | None = None, **changes: Any) -> Aval:
    """Returns an array's type with another `shape` or `dtype`. `split` is a pair: a type, whose
    mesh the result gets, and the partition specification over this mesh."""
    if split is not None:
        like, spec = split
        changes["sharding"] = like.sharding.update(spec=spec)
    return aval.update(weak_type=False, **changes)


def missing(size: Any, least: int) -> Any:
    """Returns how much a size, an int or a symbol of `jax.export`, is below `least`."""
    return max_dim(least - size, 0)


def device_axes(array: Any) -> frozenset[Hashable]:
    """Returns the mesh axes of `shard_map` over which an array, or a type, varies."""
    aval = array if isinstance(array, ShapedArray) else jax.typeof(array)
    return aval.manual_axis_type.varying


def like(
    array: Array | jax.ShapeDtypeStruct, shape: Sequence[Any], dtype: Any
) -> jax.ShapeDtypeStruct:
    """Returns the type of an array that varies over the mesh as `array` does."""
    varies = jax.typeof(array).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varies)


def varying(arrays: Sequence[Array], axes: frozenset[Hashable] = frozenset()) -> list[Array]:
    """Returns the arrays, cast to vary over `axes` and over the mesh axes of all arrays.

    JAX's own primitives do the same: inside `shard_map` the type of an array says whether it
    may differ between devices, and the transpose of a cast to "varying" is a sum over devices.
    New arrays, of zeros for example, do not vary yet. Vectors of one type are cast together, so
    that the transpose of the cast is one sum.
    """
    present = [*map(device_axes, arrays)]
    axes = axes.union(*present)
    same_type: dict[Any, list[int]] = {}
    for i, (array, over) in enumerate(zip(arrays, present, strict=True)):
        same_type.setdefault((array.shape, array.dtype, over), []).append(i)
    cast = list(arrays)
    for (*_, over), places in same_type.items():
        if over != axes:
            together = jnp.stack([arrays[i] for i in places])
            together = lax.pcast(together, tuple(axes - over), to="varying")
            for i, array in zip(places, together, strict=True):
                cast[i] = array
    return cast
