"""Turns a pass over x into a primitive of JAX with a lowering for each platform.

A pass takes x in the caller's shape, `(*mapped, *example)`, so that x is saved only once for
the backward pass. `vmap` puts its axis in front of all operands and of `shape`, the shape of
vectors. The axis has size 1 in `shape` if its name is one of the `names` to sum over.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from eqx_norm._jax import lowering, registry
from eqx_norm._jax.collectives import split
from eqx_norm._jax.lowering import Args, Aval, Target, changed

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

    def lower(
        platform: str,
        context: lowering.Context,
        *arrays: Any,
        names: Sequence[Hashable] = (),
        **params: Any,
    ) -> Args:
        if names:
            raise NameError(f"unbound axis name: {names[0]}")
        avals = lowering.results(context)
        x = lowering.operands(context)[full[0]].shape
        mapped = len(x) - params["layout"].inner
        sums = vectors(x, **params) if vectors else ()
        target = _target(platform, context, x, mapped, sums)

        def on_shard(over: lowering.Over) -> Callable[..., Sequence[Array]]:
            return functools.partial(compute, target._replace(devices=1, over=over))

        is_known = all(isinstance(size, int) for size in x)
        if sums and is_known and choose.can_split(target, x[:mapped]):
            split = lowering.with_mesh(context)
            if split is not None:
                of_shards = shards.on_each_shard(on_shard, sums, avals, full[0], **params)
                return lowering.lowered(of_shards, split, *arrays)

        def results(*arrays: Array) -> list[Array]:
            values = zip(compute(target, *arrays, **params), avals, strict=True)
            return [value.reshape(aval.shape) for value, aval in values]

        return lowering.lowered(results, context, *arrays)

    def batch(axis: Any, arrays: Args, places: Args, **params: Any) -> tuple[Args, Args]:
        return _batch(primitive, full, axis, arrays, places, **params)

    # JAX keeps as many programs. A smaller cache, which an operation of many shapes overflows,
    # would compile each one again.
    @functools.lru_cache(maxsize=4096)
    def compiled(**params: Any) -> Callable[..., list[Array]]:
        def results(*arrays: Any) -> list[Array]:
            # Under `jax_debug_nans` JAX calls this again without jit, to name an operation.
            if not isinstance(arrays[0], Tracer):
                raise FloatingPointError(f"invalid value encountered in {primitive}")
            return primitive.bind(*arrays, **params)

        return jax.jit(results)

    def evaluate(*arrays: Any, **params: Any) -> list[Array]:
        # Under `jax.disable_jit` this rule would call itself.
        with jax.disable_jit(False):
            return compiled(**params)(*arrays)

    platforms = {None: "other", "cpu": "cpu", "gpu": "gpu"}
    rules = {key: functools.partial(lower, name) for key, name in platforms.items()}
    primitive = registry.primitive(
        name, types=types, batch=batch, evaluate=evaluate, lower=rules
    )
    return primitive


def _target(
    platform: str, context: lowering.Context, x: Shape, mapped: int, sums: Sequence[Shape]
) -> Target:
    """Returns the target of a pass over an array of shape `x`, of which the first `mapped` axes
    are mapped."""
    sizes = list(x[mapped:])
    for axis in range(mapped):
        # A mapped axis that vectors share with x is not summed over.
        if sums and sums[0][axis] != x[axis]:
            sizes.append(x[axis])
    return Target(
        platform,
        platforms=lowering.platforms(context),
        devices=lowering.devices(context),
        is_known=all(isinstance(size, int) for size in sizes),
    )


def _batch(
    primitive: registry.Primitive,
    full: Sequence[int],
    axis: Any,
    arrays: Args,
    places: Args,
    **params: Any,
) -> tuple[Args, Args]:
    """Maps a primitive: the mapped axis goes in front of all operands and of the shapes among
    the parameters, with size 1 in these if it is summed over, because its name is one of
    `names`."""
    names = params.get("names", ())
    is_summed = axis.name in names
    if not is_summed and all(place is None for place in places):
        results = primitive.bind(*arrays, **params)
        return results, [None for _ in results]
    arrays = [
        lax.expand_dims(array, (0,)) if place is None else jnp.moveaxis(array, place, 0)
        for array, place in zip(arrays, places, strict=True)
    ]
    for i in full:
        arrays[i] = jnp.broadcast_to(arrays[i], (axis.size, *arrays[i].shape[1:]))
    size = 1 if is_summed else axis.size
    if "options" in params and not all(place in (0, None) for place in places):
        params["options"] = params["options"]._replace(contiguous=False)
    if "shape" in params:
        params["shape"] = (size, *params["shape"])
    if "wanted" in params:
        params["wanted"] = params["wanted"].with_shapes(lambda shape: (size, *shape))
    if not is_summed:
        results = primitive.bind(*arrays, **params)
        return results, [0 for _ in results]
    params["names"] = tuple(name for name in names if name != axis.name)
    results = primitive.bind(*arrays, **params)
    return [lax.squeeze(result, (0,)) for result in results], [None for _ in results]


def bind(
    primitive: registry.Primitive, *arrays: Shaped[Array, "..."] | None, **params: Any
) -> list[Array]:
    """Returns the primitive's results for the arrays that are not `None`, cast to vary over the
    same axes of a mesh."""
    present = [array for array in arrays if array is not None]
    return primitive.bind(*lowering.varying(present), **params)


def abstract_result(
    arrays: Sequence[Aval], like: Aval, shape: Shape, dtype: DTypeLike, mapped: int
) -> Aval:
    """Returns an abstract result, which varies over the mesh as the operands do. On a mesh with
    explicit axes it is split like `like` along the first `mapped` axes that have the same size.
    Along other axes it is whole on each device, as weights and memory are."""
    sizes = zip(like.sharding.spec, like.shape, shape, strict=True)
    places = [place if n == size else None for place, n, size in sizes]
    places[mapped:] = [None for _ in shape[mapped:]]
    spec = jax.P(*places)
    return changed(arrays[0], shape=shape, dtype=dtype, split=(like, spec))


def sum_to_shape(cotangent: Shaped[Array, "*x"], like: Aval) -> Shaped[Array, "*#x"]:
    """Returns a cotangent summed over the axes along which its operand was broadcast, and split
    over a mesh as the operand."""
    axes = tuple(summed_axes(cotangent.shape, like.shape))
    if axes:
        cotangent = cotangent.sum(axes, keepdims=True)
    return split(cotangent, like.sharding.spec)
