"""Computes bits that do not depend on the number of devices: how it sums, how it rounds.

A sum depends on its order, and the order on how the batch is cut up. Here it is fixed: the
values of each example are summed in an order that knows nothing of other examples, then the
examples by a tree that halves the batch as often as it can be halved. If the number of devices
is a power of two, each holds whole branches of that tree, and fetches the others' roots.

        1 device         ((e0 + e1) + (e2 + e3)) + ((e4 + e5) + (e6 + e7))
        2 devices        (      of the first   ) + (    of the second    )

- Forward, the branches are `Moments`, joined by their `merge`.
- Backward, they are the sums of `primitives.ACTIVATED_VJP`. Those must be complete before they
  are multiplied: a product of sums has not the bits of a sum of products. `from_first` sees to
  it. It hands out tangents from the first device, so that, transposed, the sums are collected
  there, by the tree, and are 0 on the others. What JAX sums over devices later on (in the
  gradient of x, and of a weight) is one number and zeros, which is exact in any order.

All other operations are elementwise. Every processor rounds addition, multiplication, division
and square root correctly, so that the operands and the order of operations decide the result.
But LLVM makes one operation, rounded once, of a product and a sum, in some loops and not in
others, and XLA makes a product of a division by a constant. `rounded` prevents both, in a
function and in its derivatives.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec
from jaxtyping import Array, ArrayLike

from eqx_norm.strategies import Moments

from . import collectives, reference, tree
from .jaxprs import evaluated

# Combines two sets of vectors to one, by adding them or by merging moments.
Combine = Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]]


# --- The order of sums.


def total(arrays: Sequence[Array], axes: Sequence[int]) -> tuple[Array, ...]:
    """Returns the sums, as any `reference.Total`, along the last axis, which holds the values
    of an example, then along any other, which holds examples."""
    last = arrays[0].ndim - 1
    for axis in sorted(axes, reverse=True):
        if axis == last:
            arrays = _of_values(arrays)
        else:
            sums = _of_examples([jnp.moveaxis(a, axis, 0) for a in arrays], _add)
            arrays = [jnp.expand_dims(s, axis) for s in sums]
    return tuple(arrays)


def _of_values(arrays: Sequence[Array]) -> Sequence[Array]:
    """Returns sums along the last axis, in an order that depends on nothing but its size.

    A reduction of several arrays is a loop of XLA's own, one number after the other. That of
    one array is a library's, and one array is therefore summed as its two halves.
    """
    (*_, size), axis = arrays[0].shape, arrays[0].ndim - 1
    if size == 1:
        return arrays
    if len(arrays) > 1:
        return tree.by_tree(arrays, [axis], most=8)
    whole = size - size % 2
    front, back, odd = jnp.split(arrays[0], [whole // 2, whole], axis)
    half = lax.add(*_of_values([front, back]))
    return [half + odd if size > whole else half]


def _of_examples(vectors: Sequence[Array], combine: Combine) -> Sequence[Array]:
    """Combines an odd number of neighbours each along the first axis, then by halves."""
    size = len(vectors[0])
    halves = size & -size
    blocks = [v.reshape(halves, size // halves, *v.shape[1:]) for v in vectors]
    return _by_pairs(_by_pairs([v.swapaxes(0, 1) for v in blocks], combine), combine)


def _by_pairs(vectors: Sequence[Array], combine: Combine) -> Sequence[Array]:
    """Combines neighbours along the first axis until one is left; two steps are one pass."""
    zeros = tuple(np.zeros((), v.dtype) for v in vectors)
    while (size := len(vectors[0])) > 1:
        if size > 2:
            fill = [(0, -size % 4)] + [(0, 0)] * (vectors[0].ndim - 1)
            padded = [jnp.pad(v, fill) for v in vectors]
            vectors = combine(tuple(v[::2] for v in padded), tuple(v[1::2] for v in padded))
        pairs = [v.reshape(-1, 2, *v.shape[1:]) for v in vectors]
        vectors = lax.reduce(tuple(pairs), zeros, combine, [1])
    return [v[0] for v in vectors]


def _add(a: Sequence[Array], b: Sequence[Array]) -> Sequence[Array]:
    return tuple(map(lax.add, a, b))


def _merge(a: Sequence[Array], b: Sequence[Array]) -> Sequence[Array]:
    merge = rounded(lambda a, b: jax.tree.leaves(Moments(*a).merge(Moments(*b))))
    both = merge(tuple(a), tuple(b))
    # An empty set changes nothing, not even where a square overflows.
    (count_a, *_), (count_b, *_) = a, b
    return tuple(
        jnp.where(count_a == 0, y, jnp.where(count_b == 0, x, v))
        for x, y, v in zip(a, b, both, strict=True)
    )


def statistics(x: Array, mask: Array | None = None) -> Any:
    """Returns `reference.statistics`, in this order."""
    if x.shape[-3] == x.shape[-1] == 1:
        count, *moments = _statistics_of_one(x, mask)
    else:
        count, *moments = reference.statistics(x, mask, total=total)
    # A constant, XLA would divide by in other ways than by the counts of other devices.
    return jnp.where(jnp.isnan(moments[0]), 1, count), *moments


def _statistics_of_one(x: Array, mask: Array | None) -> tuple[Array, ...]:
    """Returns the statistics of one value each, without the passes that find them."""
    x = reference.counted(x.astype(reference.compute_dtype(x.dtype)), mask)
    count = jnp.ones_like(x) if mask is None else jnp.broadcast_to(mask, x.shape)
    nothing = x - x  # or NaN, as it would be
    vectors = count.astype(x.dtype), x + nothing, nothing, nothing
    return tuple(vector[..., 0, :, 0] for vector in vectors)


def merged(examples: Sequence[Array], mesh_axes: Sequence[Hashable]) -> Sequence[Array]:
    """Returns the moments of all devices, of moments with an axis of examples in front."""
    vectors = _of_examples([_on_all_devices(vector) for vector in examples], _merge)
    for name in reversed(mesh_axes):
        devices = lax.axis_size(name)
        if devices & (devices - 1):
            raise ValueError(
                f"The mesh axis {name!r} has {devices} devices, but "
                "implementation='device_invariant' sums by a tree that halves the batch, of "
                "which each device must hold a branch: their number must be a power of two. "
                "implementation='auto' works with any, up to rounding."
            )
        by_pairs = functools.partial(_by_pairs, combine=_merge)
        vectors = collectives.merged(vectors, name, by_pairs)
    return vectors


def _on_all_devices(array: Array) -> Array:
    """Returns the array, which on a mesh with explicit axes may have been split: a tree cuts up
    the axis of examples in another way."""
    split = any(jax.typeof(array).sharding.spec)
    return jax.reshard(array, PartitionSpec(*[None] * array.ndim)) if split else array


def from_first(vectors: Sequence[Array], mesh_axes: Sequence[Hashable]) -> list[Array]:
    """Returns the first device's vectors. Transposed, that sums all devices' on the first one,
    and returns 0 on the others."""
    if not mesh_axes:
        return list(vectors)
    spread = jnp.stack(vectors)
    for name in mesh_axes:
        index, size = lax.axis_index(name), lax.psum(1, name)
        stride = size // 2
        while stride:
            pairs = [(i, i + stride) for i in range(0, size, 2 * stride)]
            sent = lax.ppermute(spread, name, pairs)
            spread = jnp.where(index % (2 * stride) == stride, sent, spread)
            stride //= 2
    return list(spread)


# --- Each operation rounded on its own.


def rounded(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f`, of pytrees of arrays, in which each operation is rounded by itself."""

    @functools.wraps(f)
    def call(*args: Any, **static: Any) -> Any:
        closed, shapes = jax.make_jaxpr(functools.partial(f, **static), return_shape=True)(
            *args
        )
        leaves, calls = jax.tree.leaves(args), frozenset(("jit", "pjit"))
        results = evaluated(closed.jaxpr, closed.consts, leaves, _instead, calls)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def of_sums(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `compute`, rounded; of the sums that it is given first, -0 is 0, as it is where
    several devices have added 0 to it."""

    def call(sums: Array, *arrays: Array, **parameters: Any) -> Any:
        return compute(jnp.where(sums == 0, 0, sums), *arrays, **parameters)

    return rounded(call)


def _instead(equation: Any) -> Callable[..., Array] | None:
    floats = jnp.issubdtype(getattr(equation.outvars[0].aval, "dtype", bool), np.floating)
    return _ROUNDED.get(equation.primitive.name) if floats else None


def product(a: ArrayLike, b: ArrayLike, **_: Any) -> Array:
    """Returns `a * b`, never as half of a fused multiply-add; so are its derivatives."""
    a, b = jnp.asarray(a), jnp.asarray(b)
    ndim = max(a.ndim, b.ndim)
    a, b = (lax.expand_dims(v, range(ndim - v.ndim)) for v in (a, b))
    return PRODUCT.bind(a, b)


def _power(x: ArrayLike, *, y: int) -> Array:
    if y < 0:
        return _quotient(jnp.ones_like(x), _power(x, y=-y))
    return functools.reduce(product, [x] * y, jnp.ones_like(x)) if y != 2 else product(x, x)


def _quotient(a: ArrayLike, b: ArrayLike, **_: Any) -> Array:
    """Returns a/b, where XLA sees neither a constant nor a root, of which it would make
    products: NaN is selected where a or b is NaN, as a/b is anyway."""
    return lax.div(
        a, jnp.where(jnp.isnan(a) | jnp.isnan(b), jnp.nan, b).astype(jnp.result_type(b))
    )


@jax.custom_jvp
def rsqrt(x: ArrayLike) -> Array:
    """Returns `reference.rsqrt`, by a root and a division: processors may have a fast and less
    exact instruction for both in one."""
    return _quotient(jnp.ones_like(x), lax.sqrt(x))


_ROUNDED: dict[str, Callable[..., Array]] = {
    "mul": product,
    "div": _quotient,
    "rsqrt": lambda x, **_: rsqrt(x),
    "square": lambda x, **_: product(x, x),
    "integer_pow": _power,
}


def _product(a: Array, b: Array) -> Array:
    p = a * b
    # LLVM cannot look through a selection. (It can through `optimization_barrier`, which is
    # gone by then; jax 0.10.2 and 0.12.0.1.)
    return jnp.where(jnp.isnan(p), jnp.nan, p).astype(p.dtype)


PRODUCT = Primitive("eqx_norm_product")
PRODUCT.def_impl(jax.jit(_product))
PRODUCT.def_abstract_eval(lambda a, b: lax.mul_p.abstract_eval(a, b, out_dtype=None)[0])
mlir.register_lowering(PRODUCT, mlir.lower_fun(_product, multiple_results=False))
batching.defbroadcasting(PRODUCT)
