"""Normalises rows on a TPU: the forward pass reads x and writes y; the backward pass reads x
and dy and writes dx and the sums for weight and bias. XLA:TPU would read x again for each sum.

A program holds a block of whole rows in VMEM and computes in float32. The backward pass
recomputes the moments of its rows. The sums accumulate from block to block, in order, each as a
total and a rounding error.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from eqx_norm._jax.arithmetic import two_sum
from eqx_norm._jax.lowering import like
from eqx_norm._normalise.formulas.row_norm import RowNorm

from .availability import Ref, refusal

# The 16 MiB of VMEM of a kernel must hold x, dy and dx of the backward pass twice, and about
# six arrays of float32, each of at least 16 rows.
_LONGEST = 2**14
_LANES, _SUBLANES = 128, 16  # of a tile in half precision; float32 has 8 sublanes
_VALUES = _SUBLANES * _LONGEST  # in a block


def forward(x: Array, weight: Array, bias: Array, *, norm: RowNorm) -> list[Array]:
    """Returns y. x is `(*mapped, 1, size)`, weight and bias `(1, ..., 1, size or 1)`."""

    def body(x: Ref, weight: Ref, bias: Ref, y: Ref) -> None:
        u, _ = _standardised(norm, x)
        y[...] = norm.y(u, weight[...], bias[...]).astype(y.dtype)

    return _call(body, [x], [weight, bias])


def backward(
    dy: Array, x: Array, weight: Array, bias: Array, *, norm: RowNorm, shape: Any = None
) -> list[Array]:
    """Returns dx and, if there is a `shape`, the gradients of weight and bias."""
    blocks = _blocks(x)

    def body(dy: Ref, x: Ref, weight: Ref, bias: Ref, dx: Ref, *sums: Ref) -> None:
        u, rstd = _standardised(norm, x)
        g = norm.g(dy[...].astype(jnp.float32), u, weight[...], bias[...])
        if sums:
            _add(blocks, g * u, *sums[:2])
            _add(blocks, g, *sums[2:])
        dx[...] = norm.jacobian_product(g * weight[...], u, rstd, _mean).astype(dx.dtype)

    dx, *sums = _call(body, [dy, x], [weight, bias], sums=0 if shape is None else 4)
    return [dx, *((a + b).reshape(shape) for a, b in zip(sums[::2], sums[1::2], strict=True))]


def _standardised(norm: RowNorm, ref: Ref) -> tuple[Array, Array]:
    x = ref[...].astype(jnp.float32)
    return norm.standardised(x, x.max(-1, keepdims=True) if norm.centred else None, _mean)


def _mean(x: Array) -> Array:
    return x.sum(-1, keepdims=True) / x.shape[-1]


def _blocks(x: Array) -> tuple[Sequence[int], Sequence[int]]:
    """Returns `(outer, rows, size)`, the shape in which a kernel reads x, and that of a block;
    raises `ValueError` if no block fits. To merge `outer` and `rows`, XLA:TPU would copy x,
    unless rows fill whole tiles of memory."""
    *mapped, groups, size = x.shape
    if groups > 1:
        raise refusal(x, "on a TPU the kernel serves LayerNorm and RMSNorm")
    if size > _LONGEST:
        raise refusal(x, f"a row of more than {_LONGEST} values may not fit into VMEM")
    rows = next((n for n in reversed(mapped) if n > 1), 1)
    outer = math.prod(mapped) // rows
    tiles = _VALUES // _SUBLANES // _LANES // pl.cdiv(size, _LANES)  # of 16 rows
    inner = min(rows, tiles * _SUBLANES)  # an axis that is not cut may have any size
    many = min(outer, tiles // pl.cdiv(inner, _SUBLANES))
    return (outer, rows, size), (many, inner, size)


def _call(
    body: Callable[..., None], arrays: Sequence[Array], vectors: Sequence[Array], sums: int = 0
) -> list[Array]:
    """Runs `body(*arrays, *vectors, y, *sums)` block by block and returns y and the sums. y is
    like the last of the arrays; sums are vectors in float32."""
    x, (shape, block) = arrays[-1], _blocks(arrays[-1])
    one_row = 1, 1, shape[-1]
    vectors = [jnp.broadcast_to(v.reshape(1, 1, -1), one_row) for v in vectors]
    row = pl.BlockSpec(block, lambda i, j: (i, j, 0))
    vector = pl.BlockSpec(one_row, lambda i, j: (0, 0, 0))
    y, *totals = pl.pallas_call(
        body,
        [like(x, shape, x.dtype), *[like(x, one_row, jnp.float32)] * sums],
        grid=tuple(map(pl.cdiv, shape[:2], block)),
        in_specs=[row] * len(arrays) + [vector] * len(vectors),
        out_specs=[row] + [vector] * sums,
        # A sum is added up on one core.
        compiler_params=pltpu.CompilerParams(("arbitrary" if sums else "parallel",) * 2),
        name="eqx_norm_rows",
    )(*(a.reshape(shape) for a in arrays), *vectors)
    return [y.reshape(x.shape), *totals]


def _add(blocks: Sequence[Sequence[int]], values: Array, total: Ref, rest: Ref) -> None:
    """Adds the rows of a block to a sum, which is a total and its rounding error."""
    # The last block holds undefined values beyond the end of the array.
    for axis, (size, length) in enumerate(zip(*blocks, strict=True)):
        if size % length:
            place = lax.broadcasted_iota(jnp.int32, values.shape, axis)
            values = jnp.where(pl.program_id(axis) * length + place < size, values, 0)
    part = _sum_by_halves(_sum_by_halves(values, 0, 1), 1, 8)
    is_first = (pl.program_id(0) == 0) & (pl.program_id(1) == 0)
    before, left = (jnp.where(is_first, 0, ref[...]) for ref in (total, rest))
    total[...], error = two_sum(before, part)
    rest[...] = left + error


def _sum_by_halves(x: Array, axis: int, tile: int) -> Array:
    """Returns the sum along an axis, added by halves of whole tiles, which rounds less."""
    half = x.shape[axis] // (2 * tile) * tile
    if half == 0:
        return x.sum(axis, keepdims=True)
    cut = functools.partial(lax.slice_in_dim, x, axis=axis)
    total, left = (
        _sum_by_halves(cut(0, half) + cut(half, 2 * half), axis, tile),
        cut(2 * half, None),
    )
    return total + left.sum(axis, keepdims=True) if left.size else total
