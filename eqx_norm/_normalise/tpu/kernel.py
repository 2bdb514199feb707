"""Normalises rows on a TPU: the forward pass reads x and writes y, the backward pass reads x
and dy and writes dx, and sums for weight and bias. XLA:TPU reads x again for each sum.

A program keeps a block of whole rows in VMEM and calculates in float32. The backward pass takes
the moments of its rows again. Its sums go on from block to block, in order, each as a total and
its rounding error.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from .rows import LONGEST, Norm

_LANES, _SUBLANES = 128, 16  # of a tile in half precision; float32 has 8 sublanes
_VALUES = _SUBLANES * LONGEST  # in a block


def rows(x: Array, weight: Array, bias: Array, *, norm: Norm) -> list[Array]:
    """Returns y. x is `(*mapped, 1, size)`, weight and bias `(1, ..., 1, size)`."""

    def body(x: Any, weight: Any, bias: Any, y: Any) -> None:
        u, _ = _normalised(norm, x[...])
        y[...] = (bias[...] + weight[...] * u).astype(y.dtype)

    return _call(body, [x], [weight, bias])


def gradients(
    dy: Array, x: Array, weight: Array, _: Array, *, norm: Norm, shape: Any = None
) -> list[Array]:
    """Returns dx and, if there is a `shape`, the gradients of weight and bias."""
    blocks = _blocks(x.shape)

    def body(dy: Any, x: Any, weight: Any, dx: Any, *sums: Any) -> None:
        (u, rstd), g = _normalised(norm, x[...]), dy[...].astype(jnp.float32)
        if sums:
            _add(blocks, g * u, *sums[:2])
            _add(blocks, g, *sums[2:])
        g = g * weight[...]
        g = g - _mean(g) if norm.centred else g
        dx[...] = (rstd * (g - u * _mean(g * u))).astype(dx.dtype)

    dx, *sums = _call(body, [dy, x], [weight], sums=0 if shape is None else 4)
    return [dx, *((a + b).reshape(shape) for a, b in zip(sums[::2], sums[1::2], strict=True))]


def _normalised(norm: Norm, x: Array) -> tuple[Array, Array]:
    """Returns (x - mean) rstd and rstd. As in `reference.statistics`, one of a row's values is
    subtracted first, so that a constant row becomes 0, and the mean is taken twice."""
    x = x.astype(jnp.float32)
    if norm.centred:
        k = x.max(-1, keepdims=True)
        d = x - (k + _mean(x - k))
        x = d - _mean(d)
    rstd = lax.rsqrt(_mean(x * x) + norm.eps)
    return x * rstd, rstd


def _mean(x: Array) -> Array:
    return x.sum(-1, keepdims=True) / x.shape[-1]


def _blocks(shape: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Returns `(outer, rows, size)`, as which a kernel reads x, and the shape of a block. To
    join the first two, XLA:TPU would move x, unless rows fill whole tiles of memory."""
    *mapped, _, size = shape
    rows = next((n for n in reversed(mapped) if n > 1), 1)
    outer = math.prod(mapped) // rows
    tiles = _VALUES // _SUBLANES // _LANES // pl.cdiv(size, _LANES)  # of 16 rows
    inner = min(rows, tiles * _SUBLANES)  # an axis that is not cut may have any size
    many = min(outer, tiles // pl.cdiv(inner, _SUBLANES))
    return (outer, rows, size), (many, inner, size)


def _call(
    body: Callable[..., None], arrays: Sequence[Array], vectors: Sequence[Array], sums: int = 0
) -> list[Array]:
    """Returns what `body(*arrays, *vectors, y, *sums)` writes, block by block: y is like the
    last of the arrays, and sums are vectors in float32."""
    x, (whole, block) = arrays[-1], _blocks(arrays[-1].shape)
    one_row = 1, 1, whole[-1]
    row = pl.BlockSpec(block, lambda i, j: (i, j, 0))
    vector = pl.BlockSpec(one_row, lambda i, j: (0, 0, 0))
    # Results vary over the axes of a mesh as the operands do.
    varies: Any = {"manual_axis_type": jax.typeof(x).manual_axis_type}
    like = functools.partial(jax.ShapeDtypeStruct, **varies)
    y, *totals = pl.pallas_call(
        body,
        [like(whole, x.dtype), *[like(one_row, jnp.float32)] * sums],
        grid=tuple(map(pl.cdiv, whole[:2], block)),
        in_specs=[row] * len(arrays) + [vector] * len(vectors),
        out_specs=[row] + [vector] * sums,
        # A sum is added up on one core.
        compiler_params=pltpu.CompilerParams(("arbitrary" if sums else "parallel",) * 2),
        name="eqx_norm_rows",
    )(*(a.reshape(whole) for a in arrays), *(v.reshape(one_row) for v in vectors))
    return [y.reshape(x.shape), *totals]


def _add(blocks: tuple[Any, Any], values: Array, total: Any, rest: Any) -> None:
    """Adds the rows of a block to a sum, which is a total and its rounding error."""
    # A block at the end holds anything beyond it.
    for axis, (size, length) in enumerate(zip(*blocks, strict=True)):
        if size % length:
            place = lax.broadcasted_iota(jnp.int32, values.shape, axis)
            values = jnp.where(pl.program_id(axis) * length + place < size, values, 0)
    part = _total(_total(values, 0, 1), 1, 8)
    is_first = (pl.program_id(0) == 0) & (pl.program_id(1) == 0)
    before, left = (jnp.where(is_first, 0, ref[...]) for ref in (total, rest))
    total[...] = after = before + part
    added = after - before
    rest[...] = left + ((before - (after - added)) + (part - added))


def _total(x: Array, axis: int, tile: int) -> Array:
    """Returns the sum along an axis, by halves that consist of tiles, for few roundings."""
    half = x.shape[axis] // (2 * tile) * tile
    if half == 0:
        return x.sum(axis, keepdims=True)
    cut = functools.partial(lax.slice_in_dim, x, axis=axis)
    total, left = _total(cut(0, half) + cut(half, 2 * half), axis, tile), cut(2 * half, None)
    return total + left.sum(axis, keepdims=True) if left.size else total
