"""Makes a pass over x a primitive of JAX, which is lowered for each platform by itself.

A pass takes x in the caller's shape, `(*mapped, *example)`, so that the backward pass keeps x
once. `vmap` puts its axis in front of all operands and of `shape`, the shape of vectors, where
it has size 1 if it is one of the `names` to sum over.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

from . import lowering
from .reference import Shape


class Static(NamedTuple):
    """Holds the static arguments of a pass over x."""

    ndim: int  # of one example
    channels: int  # its values are cut into this number of consecutive blocks
    implementation: str = "auto"
    alone: bool = False  # on a CPU, for y that nobody differentiates

    def flat(self, shape: Shape) -> Shape:
        """Returns the shape `(*mapped, channels, values)`. Loops of a CPU follow an array's
        axes, and rows of 7 or 8 are too short for a vector unit."""
        mapped = len(shape) - self.ndim
        first, *others = shape[mapped:] or (1,)
        channels = 1 if first == 1 else self.channels
        # With one channel, the first axis of an example may have any size.
        first = first if channels == 1 else first // channels
        return (*shape[:mapped], channels, math.prod((first, *others)))

    def cut(self, shape: Shape, whole: Shape) -> Shape:
        """Returns the shape of an operand with the first axis of an example cut into channels,
        if x, of shape `whole`, has several of its places in a channel; else `shape` itself. In
        another, XLA:TPU would copy an array, and XLA:GPU not fuse it into reductions."""
        axis = len(shape) - self.ndim
        if self.ndim == 0 or self.channels in (1, whole[axis]):
            return shape
        channels = 1 if shape[axis] == 1 else self.channels
        return (*shape[:axis], channels, shape[axis] // channels, *shape[axis + 1 :])

    def arranged(
        self, arrays: Sequence[Array], shape: Shape, *, flat: bool
    ) -> tuple[list[Array], Shape]:
        """Returns the arrays, of which the first is as large as x, and the shape of vectors, in
        the shape to calculate in: `flat`, or `cut`."""
        whole = arrays[0].shape
        form = self.flat if flat else functools.partial(self.cut, whole=whole)
        formed, length = [a.reshape(form(a.shape)) for a in arrays], form(whole)[-1:]
        if flat:
            # A mask of positions is repeated for all channels of a group, which are one row.
            formed = [
                a if a.shape[-1] in (1, *length) else jnp.tile(a, length[0] // a.shape[-1])
                for a in formed
            ]
        return formed, form(shape)

    def rows(self, shape: Shape) -> Shape:
        """Returns a shape of longer rows to calculate in outside of a pass; on a mesh with
        explicit axes, which a reshape cannot merge, `shape` itself."""
        typed = jax.sharding.get_abstract_mesh().explicit_axes
        return shape if typed else self.flat(shape)

    def spread(self, vector: Array, shape: Shape) -> Array:
        """Returns the vector repeated to broadcast to `shape`, if each of its numbers is for
        several places of an example's first axis, as for groups of channels."""
        axis = len(shape) - self.ndim
        if self.ndim == 0 or vector.shape[axis] in (1, shape[axis]):
            return vector
        return jnp.repeat(vector, shape[axis] // vector.shape[axis], axis)


class Target(NamedTuple):
    """Holds what a pass is lowered for."""

    platform: str  # "cpu", "gpu", or "other"
    platforms: Sequence[str]  # of the whole program
    is_partitioned: bool  # XLA will split arrays over devices
    is_known: bool  # sizes are ints, not symbols of `jax.export`

    @property
    def own_sums(self) -> str:
        """Returns the platform whose own form of sums serves: such sums cut arrays into parts
        of known sizes, and no collective adds them."""
        return self.platform if self.is_known and not self.is_partitioned else "other"


def new_primitive(
    name: str,
    compute: Callable[..., Sequence[Array]],
    types: Callable[..., list[Any]],
    full: Sequence[int],
) -> Primitive:
    """Returns a primitive of several results.

    **Arguments:**

    - `compute`: returns the results, in any shape of their sizes, of a `Target`, the arrays and
        the primitive's parameters but `names`.
    - `types`: returns the types of the results, of those of the arrays and the parameters.
    - `full`: the operands that must have the full size of a mapped axis, not size 1.
    """
    primitive = Primitive(f"eqx_norm_{name}")
    primitive.multiple_results = True

    def lower(platform: str, context: Any, *arrays: Any, names: Any = (), **static: Any) -> Any:
        if names:
            raise NameError(f"unbound axis name: {names[0]}")
        sizes = [size for aval in lowering.operands(context) for size in aval.shape]
        target = Target(
            platform,
            lowering.platforms(context),
            lowering.is_partitioned(context),
            all(isinstance(size, int) for size in sizes),
        )

        def results(*arrays: Array) -> list[Array]:
            avals = lowering.results(context)
            values = zip(compute(target, *arrays, **static), avals, strict=True)
            return [value.reshape(aval.shape) for value, aval in values]

        return lowering.lowered(results, context, *arrays)

    mlir.register_lowering(primitive, functools.partial(lower, "other"))
    for platform in ("cpu", "gpu"):
        mlir.register_lowering(primitive, functools.partial(lower, platform), platform)

    @functools.lru_cache
    def compiled(**parameters: Any) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **parameters))

    @primitive.def_impl
    def _(*arrays: Any, **parameters: Any) -> Any:
        # Under `jax.disable_jit` this rule would call itself.
        with jax.disable_jit(False):
            return compiled(**parameters)(*arrays)

    primitive.def_abstract_eval(types)

    def batch(axis: Any, arrays: Any, places: Any, **parameters: Any) -> Any:
        names = parameters.get("names", ())
        is_summed = axis.name in names
        if not is_summed and all(place is None for place in places):
            results = primitive.bind(*arrays, **parameters)
            return results, [None] * len(results)
        arrays = [
            lax.expand_dims(array, (0,)) if place is None else jnp.moveaxis(array, place, 0)
            for array, place in zip(arrays, places, strict=True)
        ]
        for i in full:
            arrays[i] = jnp.broadcast_to(arrays[i], (axis.size, *arrays[i].shape[1:]))
        if "shape" in parameters:
            size = 1 if is_summed else axis.size
            parameters["shape"] = (size, *parameters["shape"])
        if is_summed:
            parameters["names"] = tuple(name for name in names if name != axis.name)
        results = primitive.bind(*arrays, **parameters)
        if is_summed:
            return [lax.squeeze(result, (0,)) for result in results], [None] * len(results)
        return results, [0] * len(results)

    batching.fancy_primitive_batchers[primitive] = batch
    return primitive


def bind(primitive: Primitive, *arrays: Array | None, **parameters: Any) -> list[Array]:
    """Returns the primitive's results for the arrays that are not `None`, cast to vary over the
    same axes of a mesh."""
    present = [array for array in arrays if array is not None]
    return primitive.bind(*lowering.varying(present), **parameters)
