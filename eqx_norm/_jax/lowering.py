"""Wraps interfaces that a release of JAX may change: the context in which a primitive is
lowered, and the types of arrays.

Checked with jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray, max_dim
from jax.interpreters import mlir
from jax.typing import DTypeLike
from jaxtyping import Array

Context = mlir.LoweringRuleContext  # in which JAX lowers a primitive
Aval = ShapedArray  # the type of an array
Args = Sequence[Any]  # of a primitive's rule, or its results: arrays, types, places, zeros
Size = Any  # of an axis: an int, or a symbol of `jax.export`
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
    return cast(Sequence[Aval], context.avals_in)


def results(context: Context) -> Sequence[Aval]:
    """Returns the types of a primitive's results."""
    return cast(Sequence[Aval], context.avals_out)


def platforms(context: Context) -> Sequence[str]:
    """Returns the platforms of the program that a primitive is lowered for."""
    return context.module_context.platforms


def devices(context: Context) -> int:
    """Returns the number of devices over which XLA may split the program: 1 inside `shard_map`,
    unless some axes of its mesh are automatic."""
    axes: Any = context.module_context.axis_context  # one of three private classes
    if not hasattr(axes, "manual_axes"):
        return getattr(axes, "num_devices", None) or 1
    automatic = [name for name in axes.mesh.shape if name not in axes.manual_axes]
    return math.prod(axes.mesh.shape[name] for name in automatic)


def with_mesh(context: Context) -> Context | None:
    """Returns the context with a mesh, as `custom_partitioning` needs, of a program that XLA
    will split. Returns `None` on one device, inside `shard_map`, for `jax.export`, which cannot
    save Python code, and with XLA's older partitioner."""
    module = context.module_context
    axes: Any = module.axis_context
    config: Any = jax.config  # its options have no types
    if hasattr(axes, "manual_axes") or devices(context) == 1:
        return None
    if module.lowering_parameters.for_export or not config.jax_use_shardy_partitioner:
        return None
    # Only the mesh's shape is used: any device will do.
    assignment = tuple(jax.local_devices()[:1]) * axes.num_devices
    mesh = _mesh_of_primes(operands(context), axes.num_devices)
    axes = dataclasses.replace(axes, device_assignment=assignment, abstract_mesh=mesh)
    return context.replace(module_context=module.replace(axis_context=axes))


def _mesh_of_primes(arrays: Sequence[Aval], devices: int) -> jax.sharding.AbstractMesh:
    """Returns a mesh whose axes have prime sizes: those of the mesh that the arrays are on, or
    of the number of devices. It describes how arrays are split over any mesh of the program
    whose devices are in this order."""
    sizes = (devices,)
    for array in arrays:
        if math.prod(array.sharding.mesh.axis_sizes) == devices:
            sizes = array.sharding.mesh.axis_sizes
            break
    primes = [prime for size in sizes for prime in _primes(size)]
    names = [f"mesh{i}" for i in range(len(primes))]
    return jax.sharding.AbstractMesh(tuple(primes), tuple(names))


def _primes(n: int) -> list[int]:
    """Returns the prime factors of a number, in order."""
    factors = []
    for divisor in range(2, n + 1):
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
    return factors


def without_mesh() -> AbstractContextManager[object]:
    """Returns a context without a mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def automatic_mesh() -> AbstractContextManager[object]:
    """Returns a context in which all explicit axes of the mesh are automatic."""
    mesh = jax.sharding.get_abstract_mesh()
    auto = dict.fromkeys(mesh.explicit_axes, jax.sharding.AxisType.Auto)
    return jax.sharding.use_abstract_mesh(mesh.update_axis_types(auto))


def lowered(
    function: Callable[..., Sequence[Array]], context: Context, *arrays: object
) -> Sequence[object]:
    """Returns the results of a function of arrays, lowered for types without a mesh: inside a
    primitive XLA decides how arrays are split. Arrays and results are values of MLIR."""
    with automatic_mesh():
        plain = [unsplit(aval) for aval in operands(context)]
        rule = mlir.lower_fun(function, multiple_results=True)
        return rule(context.replace(avals_in=plain), *arrays)


def unsplit(aval: Aval) -> Aval:
    """Returns the type of an array of this shape and dtype, without a mesh."""
    return ShapedArray(aval.shape, aval.dtype)


def changed(
    aval: Aval,
    *,
    shape: Sequence[Size],
    dtype: DTypeLike | None = None,
    split: tuple[Aval, jax.P],
) -> Aval:
    """Returns an array's type with another shape, and another dtype if one is given. `split` is
    a pair: a type, whose mesh the result gets, and the partition specification over this
    mesh."""
    like, spec = split
    sharding = like.sharding.update(spec=spec)
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def missing(size: Size, least: int) -> Size:
    """Returns how much a size is below `least`, 0 if it is not."""
    return max_dim(least - size, 0)


def device_axes(array: Array) -> frozenset[Hashable]:
    """Returns the mesh axes of `shard_map` over which an array varies."""
    return jax.typeof(array).manual_axis_type.varying


def like(array: Array, shape: Sequence[Size], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
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
    axes = axes.union(*map(device_axes, arrays))
    same_type: dict[Hashable, list[int]] = {}
    for i, array in enumerate(arrays):
        key = array.shape, array.dtype, device_axes(array)
        same_type.setdefault(key, []).append(i)
    cast = list(arrays)
    for places in same_type.values():
        new_axes = axes - device_axes(arrays[places[0]])
        if new_axes:
            together = jnp.stack([arrays[i] for i in places])
            together = lax.pcast(together, tuple(new_axes), to="varying")
            for i, array in zip(places, together, strict=True):
                cast[i] = array
    return cast
