"""Turns a pass over x into a primitive of JAX with a lowering for each platform.

A pass takes x in the caller's shape, `(*mapped, *example)`, so that x is saved only once for
the backward pass. `vmap` puts its axis in front of all operands and of `shape`, the shape of
vectors. The axis has size 1 in `shape` if its name is one of the `names` to sum over.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

from eqx_norm._jax import lowering, registry
from eqx_norm._jax.collectives import split
from eqx_norm._jax.lowering import Args, Aval, changed

from . import shards
from .formulas.reference import Shape, summed_axes
from .variants import choose


def new_primitive(
    name: str,
    compute: Callable[..., Sequence[Array]],
    types: Callable[..., list[Aval]],
    full: Sequence[int],
    vectors: Callable[..., Sequence[Shape]] | None = None,
) -> registry.Primitive:
    """Returns a primitive with several results.

    **Arguments:**

    - `compute`: returns the results, in any shape of the right size, given a `Target`, the
        arrays and the primitive's parameters except `names`.
    - `types`: returns the types of the results, given the arrays' types and the parameters.
    - `full`: the operands that must have the full size of a mapped axis, not size 1.
    - `vectors`: returns the shapes of the sums that `compute` merges over `Target.over`, given
        the shape of x and the parameters. In a program that XLA splits over devices, each then
        computes its shard; if `None`, XLA splits the pass itself.
    """

    def lower(platform: str, context: Any, *arrays: Any, names: Any = (), **static: Any) -> Any:
        if names:
            raise NameError(f"unbound axis name: {names[0]}")
        avals, x = lowering.results(context), lowering.operands(context)[full[0]].shape
        mapped = len(x) - static["layout"].inner
        sums = vectors(x, **static) if vectors else ()
        # A mapped axis that vectors share with x is not summed over.
        is_kept = [all(v[axis] == x[axis] for v in sums[:1]) for axis in range(mapped)]
        known = [n for axis, n in enumerate(x) if axis >= mapped or not is_kept[axis]]
        target = lowering.Target(
            platform,
            lowering.platforms(context),
            lowering.devices(context),
            all(isinstance(size, int) for size in known),
        )

        def on_shard(over: lowering.Over) -> Callable[..., Sequence[Array]]:
            local = target._replace(devices=1, over=over)
            return functools.partial(compute, local)

        is_known = all(isinstance(size, int) for size in x)
        if sums and is_known and choose.can_split(target, x[:mapped]):
            split = lowering.with_mesh(context)
            if split is not None:
                of_shards = shards.computed(on_shard, sums, avals, full[0], **static)
                return lowering.lowered(of_shards, split, *arrays)

        def results(*arrays: Array) -> list[Array]:
            values = zip(compute(target, *arrays, **static), avals, strict=True)
            return [value.reshape(aval.shape) for value, aval in values]

        return lowering.lowered(results, context, *arrays)

    @functools.lru_cache
    def compiled(**parameters: Any) -> Callable[..., list[Array]]:
        def results(*arrays: Any) -> list[Array]:
            # Under `jax_debug_nans` JAX calls this again without jit, to name an operation.
            if not isinstance(arrays[0], Tracer):
                raise FloatingPointError(f"invalid value encountered in {primitive}")
            return primitive.bind(*arrays, **parameters)

        return jax.jit(results)

    def evaluate(*arrays: Any, **parameters: Any) -> list[Array]:
        # Under `jax.disable_jit` this rule would call itself.
        with jax.disable_jit(False):
            return compiled(**parameters)(*arrays)

    def batch(axis: Any, arrays: Args, places: Args, **parameters: Any) -> Args:
        names = parameters.get("names", ())
        is_summed = axis.name in names
        if not is_summed and all(place is None for place in places):
            results = primitive.bind(*arrays, **parameters)
            return results, [None] * len(results)
        arrays = [
            lax.expand_dims(array, (0,)) if place is None else jnp.moveaxis(array, place, 0)
            for array, place in zip(arrays, places, strict=True)
        ]
        if "options" in parameters and not all(place in (0, None) for place in places):
            parameters["options"] = parameters["options"]._replace(contiguous=False)
        for i in full:
            arrays[i] = jnp.broadcast_to(arrays[i], (axis.size, *arrays[i].shape[1:]))
        size = 1 if is_summed else axis.size
        if "shape" in parameters:
            parameters["shape"] = (size, *parameters["shape"])
        if "sums" in parameters:
            parameters["sums"] = parameters["sums"].with_shapes(lambda shape: (size, *shape))
        if is_summed:
            parameters["names"] = tuple(name for name in names if name != axis.name)
        results = primitive.bind(*arrays, **parameters)
        if is_summed:
            return [lax.squeeze(result, (0,)) for result in results], [None] * len(results)
        return results, [0] * len(results)

    platforms = {None: "other", "cpu": "cpu", "gpu": "gpu"}
    rules = {key: functools.partial(lower, name) for key, name in platforms.items()}
    primitive = registry.primitive(
        name, types=types, batch=batch, evaluate=evaluate, lower=rules
    )
    return primitive


def bind(
    primitive: registry.Primitive, *arrays: Array | None, **parameters: Any
) -> list[Array]:
    """Returns the primitive's results for the arrays that are not `None`, cast to vary over the
    same axes of a mesh."""
    present = [array for array in arrays if array is not None]
    return primitive.bind(*lowering.varying(present), **parameters)


def abstract_result(
    arrays: Sequence[Aval], like: Aval, shape: Shape, dtype: Any, mapped: int
) -> Aval:
    """Returns an abstract result, which varies over the mesh as the operands do. On a mesh with
    explicit axes it is split like `like` along the first `mapped` axes that have the same size.
    Along other axes it is whole on each device, as weights and memory are."""
    sizes = zip(like.sharding.spec, like.shape, shape, strict=True)
    places = [place if n == size else None for place, n, size in sizes][:mapped]
    spec = jax.P(*places, *[None] * (len(shape) - mapped))
    return changed(arrays[0], shape=shape, dtype=dtype, split=(like, spec))


def sum_to_shape(cotangent: Array, like: Aval) -> Array:
    """Returns a cotangent summed over the axes along which its operand was broadcast, and split
    over a mesh as the operand."""
    axes = tuple(summed_axes(cotangent.shape, like.shape))
    return split(cotangent.sum(axes, keepdims=True) if axes else cotangent, like.sharding.spec)
