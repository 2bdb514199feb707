"""Normalises rows on a GPU: the forward pass reads x and writes y; the backward pass reads x
and dy and writes dx and the sums for weight and bias.

A program holds a block of whole rows in registers, in float32. The backward pass recomputes the
moments of its rows. Each backward program adds up the sums of many blocks, and XLA adds up the
sums of the programs, in order.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from eqx_norm._normalise.formulas.row_norm import RowNorm

from . import tile
from .availability import Ref, refusal
from .tile import Tile

# The most values of x that a thread can hold in the forward and in the backward pass, and the
# fewest that it should hold. Two rows in one thread take more registers than one.
_MOST, _MOST_OF_ROWS, _MOST_BACKWARD = 64, 40, 36
_AIM, _AIM_BACKWARD = 32, 16
_ADDED = 64  # blocks that a program adds up, at most: rounding grows with their number
SERVED = (
    "it serves lengths up to 8192 (in the backward pass 4608) that are 8 or a larger power of "
    "two, times an odd number up to 17 (in float32: 35)"
)


class Grid(NamedTuple):
    """Divides rows among programs."""

    tile: Tile
    rows: int  # that a program takes at once
    length: int
    period: int  # the number of rows after which the weights of blocks repeat

    @classmethod
    def of(
        cls, x: Any, groups: int, across: Sequence[int], most: Callable[[Tile], int], aim: int
    ) -> "Grid":
        """Returns the grid with the widest loads; raises `ValueError` if no grid fits."""
        m, n = x.shape
        if m > tile.MOST_ROWS:
            raise refusal(x, "it has more rows than a kernel can count")
        for it in tile.tiles(n, x.dtype.itemsize, across):
            held = it.rows * n // tile.THREADS
            best = max(1, aim // held)
            for many in (*range(best, 0, -1), *range(best + 1, most(it) // held + 1)):
                rows = many * it.rows
                if held <= most(it) and (groups % rows == 0 or rows % groups == 0):
                    return cls(it, rows, n, max(rows, groups))
        why_not = f"no block of 128 threads divides its rows; {SERVED}"
        raise refusal(x, why_not if groups == 1 else f"{why_not}, whose groups fill blocks")

    def padded(self, rows: Array) -> Array:
        """Returns the rows, padded with rows of zeros if they are fewer than a block."""
        return jnp.pad(rows, ((0, max(0, self.rows - len(rows))), (0, 0)))

    def weights(self, vectors: Array) -> Array:
        """Returns weights of groups, repeated for a period; those of one group as a vector."""
        groups = len(vectors)
        return vectors[0] if groups == 1 else jnp.tile(vectors, (self.period // groups, 1))

    def weight(self, ref: Ref, start: Array) -> Array:
        """Returns the weights of the block that begins at row `start`, one for each value."""
        shape, here = (self.rows, self.length), tile.span(start, self.rows)
        if len(ref.shape) == 1:
            return lax.broadcast_in_dim(tile.load(ref), shape, (1,))
        if ref.shape[1] == 1:
            return lax.broadcast_in_dim(tile.load(ref.at[here, 0]), shape, (0,))
        return tile.load(ref.at[here, tile.span(0, self.length)], self.tile)


def forward(x: Array, weight: Array, bias: Array, *, norm: RowNorm) -> list[Array]:
    """Returns y. x is `(*mapped, groups, n)`, and weight and bias are of shape
    `(1, ..., 1, groups or 1, n or 1)`."""
    all_rows, (weight, bias) = x.reshape(-1, x.shape[-1]), _vectors(x, weight, bias)
    groups = len(weight)

    def most(it: Tile) -> int:
        return _MOST if it.rows == 1 else _MOST_OF_ROWS

    # A sum within a warp needs no waiting; four warps share a row of more than 1024 values.
    grid = Grid.of(all_rows, groups, (1, 4), most, _AIM)
    all_rows = grid.padded(all_rows)
    m, n = all_rows.shape

    def body(program: Array, x: Ref, weight: Ref, bias: Ref, y: Ref) -> None:
        start = jnp.minimum(program * grid.rows, m - grid.rows)
        at = tile.span(start, grid.rows), tile.span(0, n)
        _, place = tile.divided(start, groups)
        u, _ = _standardised(norm, grid, x, at)
        w, b = (grid.weight(vector, place) for vector in (weight, bias))
        tile.store(y.at[at], norm.y(u, w, b))

    vectors = map(grid.weights, (weight, bias))
    (y,) = tile.call(
        body, [all_rows, *vectors], [(all_rows.shape, x.dtype)], -(-m // grid.rows)
    )
    return [y[: x.size // n].reshape(x.shape)]


def backward(
    dy: Array, x: Array, weight: Array, bias: Array, *, norm: RowNorm, shape: Any = None
) -> list[Array]:
    """Returns dx and, if there is a `shape`, the gradients of weight and bias."""
    weight, bias = _vectors(x, weight, bias, of=shape or ())
    flat, (groups, length) = (x.size // x.shape[-1], x.shape[-1]), weight.shape
    of_rows = groups > length == 1  # a row has one weight
    # All warps share each row, so that no sum over rows leaves a warp: Mosaic cannot sum
    # vectors of eight float32 over warps.
    rows = x.reshape(flat)
    grid = Grid.of(rows, groups, (tile.WARPS,), lambda _: _MOST_BACKWARD, _AIM_BACKWARD)
    padded = [grid.padded(v.reshape(flat)) for v in (dy, x)]
    (m, n), block, period = padded[0].shape, grid.rows, grid.period
    places, periods = period // block, -(-m // period)
    # Programs that run at once: two to four for each core, as the registers allow.
    at_once = tile.CORES * max(2, min(4, 64 * tile.THREADS // (grid.tile.rows * n)))
    steps = min(_ADDED, -(-periods // max(1, at_once // places)))
    programs = -(-periods // steps)

    def body(
        program: Array, dy: Ref, x: Ref, weight: Ref, bias: Ref, dx: Ref, *sums: Ref
    ) -> None:
        i, place = tile.divided(program, places)
        place = place * block
        w, b = (grid.weight(vector, place) for vector in (weight, bias))

        def step(j: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            first_row = (i * steps + j) * period + place
            start = jnp.minimum(first_row, m - block)
            at = tile.span(start, block), tile.span(0, n)
            u, rstd = _standardised(norm, grid, x, at)
            g = norm.g(tile.load(dy.at[at], grid.tile), u, w, b)
            tile.store(dx.at[at], norm.jacobian_product(g * w, u, rstd, _mean))
            if of_rows:
                for ref, values in zip(sums, (g * u, g), strict=False):
                    tile.store(ref.at[at[0]], tile.sum_along(values, 1))
                return totals
            if m % block:  # another block has added the first rows of the last block
                row = lax.broadcasted_iota(jnp.int32, (block, n), 0)
                g = jnp.where(row >= first_row - start, g, 0.0)
            return tuple(t + v for t, v in zip(totals, (g * u, g), strict=False))

        zeros = [tile.zeros((block, n), grid.tile) for _ in sums if not of_rows]
        last = jnp.minimum(steps, periods - i * steps)
        totals = lax.fori_loop(np.int32(0), last, step, tuple(zeros))
        for ref, total in zip(sums, totals, strict=False):
            if groups > 1:
                tile.store(ref.at[i, tile.span(place, block), tile.span(0, n)], total)
            elif block > 1:
                tile.store(ref.at[i], tile.sum_along(total, 0))
            else:  # Mosaic has no layout for the sum of one row
                tile.store(ref.at[tile.span(i, 1)], total)

    if of_rows:
        partial = (m,)
    elif groups == 1:
        partial = programs, n
    else:
        partial = programs, period, n
    outputs = [(padded[1].shape, x.dtype)]
    if shape is not None:
        outputs += [(partial, jnp.float32)] * 2
    vectors = map(grid.weights, (weight, bias))
    dx, *sums = tile.call(body, [*padded, *vectors], outputs, programs * places)
    if sums:
        whole_sums = [v[: flat[0]] if of_rows else v for v in sums]
        sums = _added([v.reshape(-1, groups, length) for v in whole_sums])
    return [dx[: flat[0]].reshape(x.shape), *(v.reshape(shape) for v in sums)]


def _added(sums: Sequence[Array]) -> Sequence[Array]:
    """Returns two sums along the first axis, by one reduction: XLA launches one kernel."""
    zero = [jnp.float32(0)] * 2
    return lax.reduce(sums, zero, lambda a, b: [a[0] + b[0], a[1] + b[1]], [0])


def _vectors(x: Array, *vectors: Array, of: Sequence[int] = ()) -> list[Array]:
    """Returns the vectors in one shape, `(1, n)`, `(groups, n)` or `(groups, 1)`."""
    groups, length = jnp.broadcast_shapes(of[-2:], *(v.shape[-2:] for v in vectors))
    shape = groups, x.shape[-1] if groups == 1 else length
    return [jnp.broadcast_to(v.reshape(v.shape[-2:]), shape) for v in vectors]


def _standardised(norm: RowNorm, grid: Grid, x: Ref, at: Any) -> tuple[Array, Array]:
    shape = grid.rows, x.shape[1]
    k = lax.broadcast_in_dim(tile.load(x.at[at[0], 0]), shape, (0,)) if norm.centred else None
    return norm.standardised(tile.load(x.at[at], grid.tile), k, _mean)


def _mean(rows: Array) -> Array:
    mean = tile.sum_along(rows, 1) * (1 / rows.shape[1])
    return lax.broadcast_in_dim(mean, rows.shape, (0,))
