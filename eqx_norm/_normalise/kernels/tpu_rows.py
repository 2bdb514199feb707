"""Normalises rows on a TPU: the forward pass reads x and writes y; the backward pass reads x
and dy and writes dx and the sums for weight and bias. XLA:TPU would read x again for each sum.

A program holds a block of whole rows in VMEM and computes in float32. The backward pass
recomputes the moments of its rows. The sums accumulate from block to block, in order, each as a
float `hi` and its rounding error `lo`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from eqx_norm._jax.arithmetic import two_sum
from eqx_norm._jax.lowering import like
from eqx_norm._normalise.formulas.reference import Shape
from eqx_norm._normalise.formulas.row_norm import RowNorm

from .availability import Ref, refusal

# The 16 MiB of VMEM of a kernel must hold x, dy and dx of the backward pass twice, and about
# six arrays of float32, each of at least 16 rows.
_LONGEST = 2**14
_LANES, _SUBLANES = 128, 16  # of a tile in half precision; float32 has 8 sublanes
_VALUES = _SUBLANES * _LONGEST  # in a block

Block = Float32[Array, "outer rows n"]
OfRows = Float32[Array, "outer rows 1"]


def forward(
    x: Float[Array, "*mapped groups n"],
    weight: Float[Array, "*ones weight_n"],
    bias: Float[Array, "*ones bias_n"],
    *,
    norm: RowNorm,
) -> list[Float[Array, "*mapped groups n"]]:
    """Returns y. The weight and the bias are of shape `(1, ..., 1, n or 1)`."""

    def body(x: Ref, weight: Ref, bias: Ref, y: Ref) -> None:
        u, _ = _standardised(norm, x)
        y[...] = norm.y(u, weight[...], bias[...]).astype(y.dtype)

    return _call(body, [x], [weight, bias])


def backward(
    dy: Float[Array, "*mapped groups n"],
    x: Float[Array, "*mapped groups n"],
    weight: Float[Array, "*ones weight_n"],
    bias: Float[Array, "*ones bias_n"],
    *,
    norm: RowNorm,
    shape: Shape | None = None,
) -> list[Float[Array, "..."]]:
    """Returns dx and, if there is a `shape`, the gradients of weight and bias."""
    blocks = _blocks(x)

    def body(dy: Ref, x: Ref, weight: Ref, bias: Ref, dx: Ref, *sums: Ref) -> None:
        u, rstd = _standardised(norm, x)
        g = norm.g(dy[...].astype(jnp.float32), u, weight[...], bias[...])
        if sums:
            dweight_hi, dweight_lo, dbias_hi, dbias_lo = sums
            _add(blocks, g * u, dweight_hi, dweight_lo)
            _add(blocks, g, dbias_hi, dbias_lo)
        dx[...] = norm.jacobian_product(g * weight[...], u, rstd, _mean).astype(dx.dtype)

    if shape is None:
        return _call(body, [dy, x], [weight, bias])
    dx, dweight_hi, dweight_lo, dbias_hi, dbias_lo = _call(
        body, [dy, x], [weight, bias], sums=4
    )
    dweight = (dweight_hi + dweight_lo).reshape(shape)
    dbias = (dbias_hi + dbias_lo).reshape(shape)
    return [dx, dweight, dbias]


def _standardised(norm: RowNorm, ref: Ref) -> tuple[Block, OfRows]:
    x = ref[...].astype(jnp.float32)
    k = x.max(-1, keepdims=True) if norm.centred else None
    return norm.standardised(x, k, _mean)


def _mean(x: Block) -> OfRows:
    return x.sum(-1, keepdims=True) / x.shape[-1]


class Blocks(NamedTuple):
    """Cuts x into blocks of whole rows. To merge `outer` and `rows`, XLA:TPU would copy x,
    unless rows fill whole tiles of memory."""

    shape: tuple[int, int, int]  # (outer, rows, n), in which a kernel reads x
    block: tuple[int, int, int]


def _blocks(x: Float[Array, "*mapped groups n"]) -> Blocks:
    """Returns the blocks of x; raises `ValueError` if no block fits."""
    *mapped, groups, n = x.shape
    if groups > 1:
        raise refusal(x, "on a TPU the kernel serves LayerNorm and RMSNorm")
    if n > _LONGEST:
        raise refusal(x, f"a row of more than {_LONGEST} values may not fit into VMEM")
    # Mapped axes of size 1 do not matter; the last other one is not merged with those before.
    sizes = [size for size in mapped if size > 1]
    rows = sizes[-1] if sizes else 1
    outer = math.prod(mapped) // rows
    tiles = _VALUES // _SUBLANES // _LANES // pl.cdiv(n, _LANES)  # of 16 rows
    block_rows = min(rows, tiles * _SUBLANES)  # an axis that is not cut may have any size
    block_outer = min(outer, tiles // pl.cdiv(block_rows, _SUBLANES))
    return Blocks((outer, rows, n), (block_outer, block_rows, n))


def _call(
    body: Callable[..., None],
    arrays: Sequence[Float[Array, "*mapped groups n"]],
    vectors: Sequence[Float[Array, "..."]],
    sums: int = 0,
) -> list[Float[Array, "..."]]:
    """Runs `body(*arrays, *vectors, y, *sums)` block by block and returns y and the sums. y is
    like the last of the arrays; sums are vectors in float32, `(1, 1, n)`."""
    x = arrays[-1]
    shape, block = _blocks(x)
    outer, rows, n = shape
    one_row = 1, 1, n
    vectors = [jnp.broadcast_to(v.reshape(1, 1, -1), one_row) for v in vectors]
    block_spec = pl.BlockSpec(block, lambda i, j: (i, j, 0))
    row_spec = pl.BlockSpec(one_row, lambda i, j: (0, 0, 0))
    # A sum is added up on one core.
    semantics = "arbitrary" if sums else "parallel"
    kernel = pl.pallas_call(
        body,
        out_shape=[like(x, shape, x.dtype)] + [like(x, one_row, jnp.float32)] * sums,
        grid=(pl.cdiv(outer, block[0]), pl.cdiv(rows, block[1])),
        in_specs=[block_spec] * len(arrays) + [row_spec] * len(vectors),
        out_specs=[block_spec] + [row_spec] * sums,
        compiler_params=pltpu.CompilerParams((semantics, semantics)),
        name="eqx_norm_rows",
    )
    y, *totals = kernel(*[array.reshape(shape) for array in arrays], *vectors)
    return [y.reshape(x.shape), *totals]


def _add(blocks: Blocks, values: Block, hi: Ref, lo: Ref) -> None:
    """Adds the rows of a block to a sum, `hi + lo`."""
    # The last block holds undefined values beyond the end of the array.
    for axis, (size, length) in enumerate(zip(blocks.shape, blocks.block, strict=True)):
        if size % length:
            place = lax.broadcasted_iota(jnp.int32, values.shape, axis)
            values = jnp.where(pl.program_id(axis) * length + place < size, values, 0)
    part = _sum_by_halves(values, 0, 1)
    part = _sum_by_halves(part, 1, 8)
    is_first = (pl.program_id(0) == 0) & (pl.program_id(1) == 0)
    old_hi = jnp.where(is_first, 0, hi[...])
    old_lo = jnp.where(is_first, 0, lo[...])
    hi[...], error = two_sum(old_hi, part)
    lo[...] = old_lo + error


def _sum_by_halves(x: Block, axis: int, tile: int) -> Float32[Array, "outer_or_1 rows_or_1 n"]:
    """Returns the sum along an axis, added by halves of whole tiles, which rounds less."""
    half = x.shape[axis] // (2 * tile) * tile
    if half == 0:
        return x.sum(axis, keepdims=True)
    cut = functools.partial(lax.slice_in_dim, x, axis=axis)
    total = _sum_by_halves(cut(0, half) + cut(half, 2 * half), axis, tile)
    left = cut(2 * half, None)
    if left.size == 0:
        return total
    return total + left.sum(axis, keepdims=True)
