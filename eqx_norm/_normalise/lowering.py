"""Reads and writes what a release of JAX may change: the context in which a primitive is
lowered, and the types of arrays.

Checked with jax 0.10.2, 0.11.2 and 0.12.0.1. Primitives themselves, their derivatives and
batching are defined by `jax.extend.core` and `jax.interpreters`, in the files that have them:
tests/house/test_versions.py lists both kinds.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import mlir
from jaxtyping import Array


def operands(context: Any) -> Sequence[Any]:
    """Returns the types of a primitive's operands."""
    return context.avals_in


def results(context: Any) -> Sequence[Any]:
    """Returns the types of a primitive's results."""
    return context.avals_out


def platforms(context: Any) -> Sequence[str]:
    """Returns the platforms of the program that a primitive is lowered for."""
    return context.module_context.platforms


def is_partitioned(context: Any) -> bool:
    """Returns whether XLA will split the program over devices: `False` on one device and inside
    `shard_map`."""
    axes = context.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return frozenset(axes.manual_axes) != frozenset(axes.mesh.axis_names)
    return (getattr(axes, "num_devices", None) or 1) > 1


def automatic_mesh() -> AbstractContextManager[Any]:
    """Returns a context in which all explicit axes of the mesh are automatic."""
    mesh = jax.sharding.get_abstract_mesh()
    auto = dict.fromkeys(mesh.explicit_axes, jax.sharding.AxisType.Auto)
    return jax.sharding.use_abstract_mesh(mesh.update_axis_types(auto))


def lowered(function: Callable[..., Any], context: Any, *arrays: Any) -> Any:
    """Returns the results of a function of arrays, lowered for types without a mesh:
    in a primitive XLA decides how they are split."""
    with automatic_mesh():
        plain = [*map(unsplit, operands(context))]
        return mlir.lower_fun(function, True)(context.replace(avals_in=plain), *arrays)


def unsplit(aval: Any) -> ShapedArray:
    """Returns the type of an array of this shape and dtype, without a mesh."""
    return ShapedArray(aval.shape, aval.dtype)


def changed(aval: Any, *, split: tuple[Any, Any] | None = None, **changes: Any) -> Any:
    """Returns an array's type with another `shape` or `dtype`; `split`: a type whose mesh it is
    to have, and by which specification it is split over that."""
    if split is not None:
        like, spec = split
        changes["sharding"] = like.sharding.update(spec=spec)
    return aval.update(weak_type=False, **changes)


def device_axes(array: Any) -> frozenset[Any]:
    """Returns the mesh axes of `shard_map` along which an array, or a type, may differ."""
    aval = array if isinstance(array, ShapedArray) else jax.typeof(array)
    return aval.manual_axis_type.varying


def like(array: Array, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's result, which may differ between devices as `array`."""
    varies = jax.typeof(array).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varies)


def varying(arrays: Sequence[Array], axes: frozenset[Any] = frozenset()) -> list[Array]:
    """Returns the arrays, cast to vary over `axes` and each mesh axis over which one varies.

    JAX's own primitives do the same: inside `shard_map` the type of an array says whether it
    may differ between devices, and the transpose of a cast to "varying" is a sum over devices.
    New arrays, of zeros for example, do not vary yet. Vectors of one shape are cast together,
    so that their transpose is one sum.
    """
    present = [*map(device_axes, arrays)]
    axes = axes.union(*present)
    alike: dict[Any, list[int]] = {}
    for i, (array, over) in enumerate(zip(arrays, present, strict=True)):
        alike.setdefault((array.shape, array.dtype, over), []).append(i)
    cast = list(arrays)
    for (*_, over), places in alike.items():
        if over != axes:
            together = jnp.stack([arrays[i] for i in places])
            together = lax.pcast(together, tuple(axes - over), to="varying")
            for i, array in zip(places, together, strict=True):
                cast[i] = array
    return cast
