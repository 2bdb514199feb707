"""Normalises rows on a GPU: the forward pass reads x and writes y; the backward pass reads x
and dy and writes dx and the sums for weight and bias.

A program holds a block of whole rows in registers, in float32. The backward pass recomputes the
moments of its rows. Each backward program adds up the sums of many blocks, and XLA adds up the
sums of the programs, in order.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from eqx_norm._normalise.formulas.reference import Shape
from eqx_norm._normalise.formulas.row_norm import RowNorm

from . import tile
from .availability import ArrayOrType, Ref, refusal
from .tile import Tile

# The most values of x that a thread can hold in the forward and in the backward pass, and the
# number to aim for. Two rows in one thread take more registers than one.
_MOST, _MOST_OF_ROWS, _MOST_BACKWARD = 64, 40, 36
_AIM, _AIM_BACKWARD = 32, 16
_ADDED = 64  # blocks that a program adds up, at most: rounding grows with their number
SERVED = (
    "it serves lengths up to 8192 (in the backward pass 4608) that are 8 or a larger power of "
    "two, times an odd number up to 17 (in float32: 35)"
)

Block = Float32[Array, "rows n"]  # whole rows, which a program computes at once


class Grid(NamedTuple):
    """Divides rows among programs."""

    tile: Tile
    rows: int  # of a block
    length: int  # of a row
    period: int  # the number of rows after which the weights of blocks repeat

    @classmethod
    def of(
        cls,
        x: Float[ArrayOrType, "rows n"],
        groups: int,
        warps: Sequence[int],
        most: Callable[[Tile], int],
        aim: int,
    ) -> "Grid":
        """Returns the grid with the widest loads; raises `ValueError` if no grid fits.

        **Arguments:** `warps`: the numbers of warps that may share a row. `most`, `aim`: how
        many values a thread can hold with a tile, and how many it should hold.
        """
        m, n = x.shape
        if m > tile.MOST_ROWS:
            raise refusal(x, "it has more rows than a kernel can count")
        for of_block in tile.tiles(n, x.dtype.itemsize, warps):
            held = of_block.rows * n // tile.THREADS  # by a thread, of each of its rows
            limit = most(of_block) // held
            if limit == 0:
                continue
            best = max(1, aim // held)
            for factor in (*range(best, 0, -1), *range(best + 1, limit + 1)):
                rows = factor * of_block.rows
                if groups % rows == 0 or rows % groups == 0:
                    return cls(of_block, rows, n, max(rows, groups))
        why_not = f"no block of 128 threads divides its rows; {SERVED}"
        raise refusal(x, why_not if groups == 1 else f"{why_not}, whose groups fill blocks")

    def padded(self, rows: Float[Array, "rows n"]) -> Float[Array, "padded_rows n"]:
        """Returns the rows, padded with rows of zeros if they are fewer than a block."""
        return jnp.pad(rows, ((0, max(0, self.rows - len(rows))), (0, 0)))

    def repeated(self, weights: Float[Array, "groups n"]) -> Float[Array, "..."]:
        """Returns weights of groups, repeated for a period; those of one group as a vector."""
        groups = len(weights)
        if groups == 1:
            return weights[0]
        return jnp.tile(weights, (self.period // groups, 1))

    def load_weight(self, ref: Ref, first_row: Int32[Array, ""]) -> Block:
        """Returns the weight of each value of the block that begins at this row of a period."""
        shape = self.rows, self.length
        rows = tile.span(first_row, self.rows)
        if len(ref.shape) == 1:  # (n,)
            return lax.broadcast_in_dim(tile.load(ref), shape, (1,))
        if ref.shape[1] == 1:  # (period, 1)
            return lax.broadcast_in_dim(tile.load(ref.at[rows, 0]), shape, (0,))
        return tile.load(ref.at[rows, tile.span(0, self.length)], self.tile)

    def standardised(
        self, norm: RowNorm, x: Ref, start: Int32[Array, ""]
    ) -> tuple[Block, Block]:
        """Returns u and r of the block of x that begins at row `start`."""
        rows = tile.span(start, self.rows)
        k = None
        if norm.centred:
            first_values = tile.load(x.at[rows, 0])
            k = lax.broadcast_in_dim(first_values, (self.rows, self.length), (0,))
        block = tile.load(x.at[rows, tile.span(0, self.length)], self.tile)
        return norm.standardised(block, k, _mean)


def forward(
    x: Float[Array, "*mapped groups n"],
    weight: Float[Array, "*ones weight_groups weight_n"],
    bias: Float[Array, "*ones bias_groups bias_n"],
    *,
    norm: RowNorm,
) -> list[Float[Array, "*mapped groups n"]]:
    """Returns y. The weight and the bias are of shape `(1, ..., 1, groups or 1, n or 1)`."""
    rows = x.reshape(-1, x.shape[-1])
    weight, bias = _in_one_shape(x, weight, bias)
    groups = len(weight)

    def most(of_block: Tile) -> int:
        return _MOST if of_block.rows == 1 else _MOST_OF_ROWS

    # A sum within a warp needs no waiting; four warps share a row of more than 1024 values.
    grid = Grid.of(rows, groups, (1, 4), most, _AIM)
    rows = grid.padded(rows)
    m, n = rows.shape

    def body(program: Int32[Array, ""], x: Ref, weight: Ref, bias: Ref, y: Ref) -> None:
        start = jnp.minimum(program * grid.rows, m - grid.rows)
        _, first_row = tile.unravel(start, groups)
        u, _ = grid.standardised(norm, x, start)
        w = grid.load_weight(weight, first_row)
        b = grid.load_weight(bias, first_row)
        block = tile.span(start, grid.rows), tile.span(0, n)
        tile.store(y.at[block], norm.y(u, w, b))

    arrays = [rows, grid.repeated(weight), grid.repeated(bias)]
    output = jax.ShapeDtypeStruct((m, n), x.dtype)
    (y,) = tile.call(body, arrays, [output], -(-m // grid.rows))
    return [y[: x.size // n].reshape(x.shape)]


def backward(
    dy: Float[Array, "*mapped groups n"],
    x: Float[Array, "*mapped groups n"],
    weight: Float[Array, "*ones weight_groups weight_n"],
    bias: Float[Array, "*ones bias_groups bias_n"],
    *,
    norm: RowNorm,
    shape: Shape | None = None,
) -> list[Float[Array, "..."]]:
    """Returns dx and, if there is a `shape`, the gradients of weight and bias."""
    weight, bias = _in_one_shape(x, weight, bias, shape=shape or ())
    groups, length = weight.shape
    is_of_rows = groups > length == 1  # a row has one weight
    n = x.shape[-1]
    unpadded = x.size // n, n
    # All warps share each row, so that no sum over rows leaves a warp: Mosaic cannot sum
    # vectors of eight float32 over warps.
    rows_type = jax.ShapeDtypeStruct(unpadded, x.dtype)
    grid = Grid.of(rows_type, groups, (tile.WARPS,), lambda _: _MOST_BACKWARD, _AIM_BACKWARD)
    dy_rows = grid.padded(dy.reshape(unpadded))
    x_rows = grid.padded(x.reshape(unpadded))
    m, block, period = len(x_rows), grid.rows, grid.period
    # A program adds up blocks that have the same place in their periods.
    places, periods = period // block, -(-m // period)
    # Programs that run at once: two to four for each core, as the registers allow.
    at_once = tile.CORES * max(2, min(4, 64 * tile.THREADS // (block * n)))
    steps = min(_ADDED, -(-periods // max(1, at_once // places)))
    parts = -(-periods // steps)

    def body(
        program: Int32[Array, ""], dy: Ref, x: Ref, weight: Ref, bias: Ref, dx: Ref, *sums: Ref
    ) -> None:
        part, place = tile.unravel(program, places)
        first_row = place * block  # in a period
        w = grid.load_weight(weight, first_row)
        b = grid.load_weight(bias, first_row)

        def step(i: Int32[Array, ""], totals: tuple[Block, ...]) -> tuple[Block, ...]:
            full_start = (part * steps + i) * period + first_row
            start = jnp.minimum(full_start, m - block)  # a last block overlaps another
            rows, columns = tile.span(start, block), tile.span(0, n)
            u, rstd = grid.standardised(norm, x, start)
            g = norm.g(tile.load(dy.at[rows, columns], grid.tile), u, w, b)
            tile.store(dx.at[rows, columns], norm.jacobian_product(g * w, u, rstd, _mean))
            if not sums:
                return ()
            if is_of_rows:
                dweight, dbias = sums
                tile.store(dweight.at[rows], tile.sum_along(g * u, 1))
                tile.store(dbias.at[rows], tile.sum_along(g, 1))
                return ()
            if m % block:  # another block has added the first rows of the last block
                row = lax.broadcasted_iota(jnp.int32, (block, n), 0)
                g = jnp.where(row >= full_start - start, g, 0.0)
            sum_gu, sum_g = totals
            return sum_gu + g * u, sum_g + g

        has_totals = len(sums) > 0 and not is_of_rows
        zeros = [tile.zeros((block, n), grid.tile) for _ in sums] if has_totals else []
        last = jnp.minimum(steps, periods - part * steps)
        totals = lax.fori_loop(np.int32(0), last, step, tuple(zeros))
        if not has_totals:
            return
        for ref, total in zip(sums, totals, strict=True):
            if groups > 1:
                rows, columns = tile.span(first_row, block), tile.span(0, n)
                tile.store(ref.at[part, rows, columns], total)
            elif block > 1:
                tile.store(ref.at[part], tile.sum_along(total, 0))
            else:  # Mosaic has no layout for the sum of one row
                tile.store(ref.at[tile.span(part, 1)], total)

    arrays = [dy_rows, x_rows, grid.repeated(weight), grid.repeated(bias)]
    dx_type = jax.ShapeDtypeStruct((m, n), x.dtype)
    if shape is None:
        (dx,) = tile.call(body, arrays, [dx_type], parts * places)
        return [dx[: unpadded[0]].reshape(x.shape)]
    if is_of_rows:
        partial_shape = (m,)
    elif groups == 1:
        partial_shape = parts, n
    else:
        partial_shape = parts, period, n
    partial = jax.ShapeDtypeStruct(partial_shape, jnp.float32)
    dx, *sums = tile.call(body, arrays, [dx_type, partial, partial], parts * places)
    if is_of_rows:
        sums = [v[: unpadded[0]] for v in sums]
    dweight, dbias = _added([v.reshape(-1, groups, length) for v in sums])
    dx = dx[: unpadded[0]].reshape(x.shape)
    return [dx, dweight.reshape(shape), dbias.reshape(shape)]


def _added(
    sums: Sequence[Float32[Array, "parts groups n"]],
) -> Sequence[Float32[Array, "groups n"]]:
    """Returns two sums along the first axis, by one reduction: XLA launches one kernel."""
    zero = [jnp.float32(0)] * 2
    return lax.reduce(sums, zero, lambda a, b: [a[0] + b[0], a[1] + b[1]], [0])


def _in_one_shape(
    x: Float[Array, "*mapped groups n"],
    weight: Float[Array, "..."],
    bias: Float[Array, "..."],
    shape: Shape = (),
) -> list[Float[Array, "weight_groups weight_n"]]:
    """Returns weight and bias in one shape, `(1, n)`, `(groups, n)` or `(groups, 1)`, to which
    `shape`, that of their gradients, broadcasts."""
    groups, length = jnp.broadcast_shapes(shape[-2:], weight.shape[-2:], bias.shape[-2:])
    if groups == 1:
        length = x.shape[-1]
    vectors = (weight, bias)
    return [jnp.broadcast_to(v.reshape(v.shape[-2:]), (groups, length)) for v in vectors]


def _mean(rows: Block) -> Block:
    mean = tile.sum_along(rows, 1) * (1 / rows.shape[1])
    return lax.broadcast_in_dim(mean, rows.shape, (0,))
