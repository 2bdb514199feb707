"""Normalises rows on a TPU: the forward pass reads x and writes y, the backward pass reads x
and dy and writes dx, and sums for weight and bias. XLA:TPU reads x again for each sum.

A program keeps a block of whole rows in VMEM and calculates in float32. The backward pass takes
the moments of its rows again. Its sums go on from block to block, in order, each as a total and
its rounding error.

The kernels read x as `(outer, rows, size)`, because XLA:TPU would have to move x to join the
first two, unless the rows fill whole tiles of memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from eqx_norm._normalise.elementwise import applied

from .rows import Norm

# In a block. Of the 16 MiB of VMEM that a kernel gets, the backward pass takes x, dy and dx
# twice, and six arrays of float32 or so.
_VALUES = 2**18
_LANES, _SUBLANES = 128, 16  # of a tile in half precision; float32 has 8 sublanes
LONGEST = _VALUES // _SUBLANES


def rows(x: Array, weight: Array, bias: Array, *, norm: Norm) -> list[Array]:
    """Returns y. x is `(*mapped, 1, size)`, weight and bias `(1, ..., 1, size)`."""
    body, y = functools.partial(_rows, norm), jax.ShapeDtypeStruct(x.shape, norm.dtype)
    return _Blocks(x).call(body, [x, weight, bias], [y])


def _rows(norm: Norm, x: Any, weight: Any, bias: Any, y: Any) -> None:
    u, _ = _normalised(norm, x[...])
    y[...] = applied(norm.activation, bias[...] + weight[...] * u).astype(y.dtype)


def gradients(
    dy: Array, x: Array, weight: Array, bias: Array, *, norm: Norm, sums: bool
) -> list[Array]:
    """Returns dx and, if `sums`, the gradients of weight and bias."""
    blocks = _Blocks(x)
    vectors = [jax.ShapeDtypeStruct(weight.shape, jnp.float32)] * 4 * sums
    body = functools.partial(_gradients, norm, blocks)
    dx, *found = blocks.call(body, [dy, x, weight, bias], [x, *vectors])
    return [dx, *map(jnp.add, found[::2], found[1::2])]


def _gradients(norm: Norm, blocks: "_Blocks", *refs: Any) -> None:
    dy, x, weight, bias, dx, *sums = refs
    (u, rstd), g = _normalised(norm, x[...]), dy[...].astype(jnp.float32)
    if norm.activation is not None:
        activation = functools.partial(applied, norm.activation)
        (g,) = jax.vjp(activation, bias[...] + weight[...] * u)[1](g)
    if sums:
        blocks.add(g * u, *sums[:2])
        blocks.add(g, *sums[2:])
    g = g * weight[...]
    if norm.centred:
        g = g - _mean(g)
    dx[...] = (rstd * (g - u * _mean(g * u))).astype(dx.dtype)


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


class _Blocks:
    """Cuts x into blocks of rows, one for each program."""

    def __init__(self, x: Array):
        *mapped, _, size = x.shape
        rows = next((n for n in reversed(mapped) if n > 1), 1)
        self._shape = x.size // (rows * size), rows, size
        most = _VALUES // _up(size, _LANES) // _SUBLANES * _SUBLANES
        # An axis that is not cut may have any size.
        each = rows if _up(rows, _SUBLANES) <= most else _up(_even(rows, most), _SUBLANES)
        outer = _even(self._shape[0], max(1, most // _up(each, _SUBLANES)))
        self._block = outer, each, size

    def call(
        self, body: Callable[..., None], arrays: Sequence[Array], results: Sequence[Any]
    ) -> list[Array]:
        """Returns what `body(*arrays, *results)` writes, block by block."""
        one_row = 1, 1, self._block[-1]
        rows = pl.BlockSpec(self._block, lambda i, j: (i, j, 0))
        vector = pl.BlockSpec(one_row, lambda i, j: (0, 0, 0))

        def is_vector(array: Any) -> bool:
            return array.size == self._block[-1]  # as is x of one row

        def shape(array: Any) -> tuple[int, int, int]:
            return one_row if is_vector(array) else self._shape

        def specs(arrays: Sequence[Any]) -> list[pl.BlockSpec]:
            return [vector if is_vector(array) else rows for array in arrays]

        # Results vary over the axes of a mesh as the operands do.
        varies: Any = {"manual_axis_type": jax.typeof(arrays[0]).manual_axis_type}
        # A sum is added up on one core.
        order = ("arbitrary" if len(results) > 1 else "parallel",) * 2
        found = pl.pallas_call(
            body,
            [jax.ShapeDtypeStruct(shape(r), r.dtype, **varies) for r in results],
            grid=tuple(map(pl.cdiv, self._shape[:2], self._block)),
            in_specs=specs(arrays),
            out_specs=specs(results),
            compiler_params=pltpu.CompilerParams(dimension_semantics=order),
            name="eqx_norm_rows",
        )(*(array.reshape(shape(array)) for array in arrays))
        return [a.reshape(r.shape) for a, r in zip(found, results, strict=True)]

    def add(self, values: Array, total: Any, rest: Any) -> None:
        """Adds the rows of a block to a sum, which is a total and its rounding error."""
        # A block at the end holds anything beyond it.
        for axis, size in enumerate(self._shape[:2]):
            if size % (own := self._block[axis]):
                sizes = [n if i == axis else 1 for i, n in enumerate(self._block)]
                place = pl.program_id(axis) * own + lax.broadcasted_iota(jnp.int32, sizes, axis)
                values = jnp.where(place < size, values, 0)
        part = _total(_total(values, 0, 1), 1, 8)

        @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
        def _() -> None:
            total[...] = rest[...] = jnp.zeros_like(part)

        before = total[...]
        total[...] = after = before + part
        added = after - before
        rest[...] += (before - (after - added)) + (part - added)


def _total(x: Array, axis: int, tile: int) -> Array:
    """Returns the sum along an axis, by halves that consist of tiles, for few roundings."""
    half = x.shape[axis] // (2 * tile) * tile
    if half == 0:
        return x.sum(axis, keepdims=True)
    cut = functools.partial(lax.slice_in_dim, x, axis=axis)
    total, left = _total(cut(0, half) + cut(half, 2 * half), axis, tile), cut(2 * half, None)
    return total + left.sum(axis, keepdims=True) if left.size else total


def _even(size: int, most: int) -> int:
    """Returns the size of equal parts of at most this size; the last may be smaller."""
    return pl.cdiv(size, pl.cdiv(size, most))


def _up(size: int, tile: int) -> int:
    return pl.cdiv(size, tile) * tile
