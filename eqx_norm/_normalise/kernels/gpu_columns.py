r"""Computes mean and m2 of columns on a GPU in one read of x. XLA has only sums, and so reads x
twice, for the mean and for the deviations.

A program reads one slice of the rows of some columns. Each of its *lanes* accumulates, in
float32, the moments of the values of a column that the lane reads. The mean $k$ starts as the
first value. Some tiles are loaded together, and their

$$\bar d = \tfrac{1}{n_u} \sum_u (x_u - k), \quad q = \sum_u \big(x_u - k - \bar d\big)^2$$

are merged into the moments by Chan's formula; $k$ becomes the mean of all values so far. Even
if the first value is an outlier, $k$ is soon near the other values; a constant $k$ would add a
rounding error of the outlier's size each time. In a constant column every difference is 0. At
the end the program merges the lanes of a column. A second kernel merges the slices. The order
is fixed, without atomics.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from eqx_norm._jax.arithmetic import two_sum

from . import tile
from .availability import Ref, refusal
from .tile import Tile

_HELD = 32  # values of x that a thread loads at once, at most
# Programs, at least; and up to twice as many if their results are a small part of x.
_PROGRAMS, _LITTLE = 2 * tile.CORES, 1 / 25
_ROWS = 128  # lanes of a column that a program of the second kernel merges with wide loads


class Lanes(NamedTuple):
    """Holds the moments of each lane: the mean is `mean + rest`, and m2 is `m2 + m2_rest`."""

    mean: Array
    m2: Array
    rest: Array
    m2_rest: Array


def moments(x: Array) -> list[Array]:
    """Returns mean, m2 and mean_rest of each channel of x, (ensemble, rows, channels)."""
    ensemble, rows, channels = x.shape
    size = x.dtype.itemsize
    # Mosaic cannot sum vectors of eight float32 over warps.
    fit = [t for t in tile.tiles(channels, size, (4, 2, 1), 4) if t.across == 4 or t.wide <= 4]
    if rows > tile.MOST_ROWS:
        raise refusal(x, "it has more rows than a kernel can count", "ensemble, rows, channels")
    if not fit:
        raise refusal(x, "its number of channels is odd", "ensemble, rows, channels")
    it = fit[0]
    if rows < it.rows:
        x = jnp.concatenate([jnp.repeat(x[:, :1], it.rows - rows, 1), x], 1)
    tiles, left = divmod(rows, it.rows)
    blocks, ahead = channels // it.columns, max(1, min(_HELD // it.wide, tiles))
    programs = _PROGRAMS // (blocks * ensemble)
    # A slice has three float32 for each channel, which are written once and read once.
    most = min(2 * programs, int(rows * size * _LITTLE) // (2 * 3 * 4))
    each = max(ahead, -(-tiles // max(1, programs, most)))
    slices = max(1, -(-tiles // each))
    merging = Tile(*(4, 8) if slices <= _ROWS and channels % 32 == 0 else _narrow(channels), 1)
    kept = 1 if slices == 1 else -(-slices // merging.rows) * merging.rows

    def body(program: Array, x: Ref, *outputs: Ref) -> None:
        member, i, block = tile.divided(program, slices, blocks)
        first_tile, here = i * each, tile.span(block * it.columns, it.columns)

        def load(row: Array | int) -> Array:
            return tile.load(x.at[member, tile.span(row, it.rows), here], it)

        def several(many: int, start: Array | int) -> Callable[[Array, Lanes], Lanes]:
            def step(t: Array, lanes: Lanes) -> Lanes:
                at = start + t * many  # the number of tiles that the lanes have read
                values = [load((first_tile + at + u) * it.rows) for u in range(many)]
                return _extended(lanes, values, at.astype(jnp.float32), many)

            return step

        zeros = tile.zeros((it.rows, it.columns), it)
        # Inside `shard_map`, loaded values vary over the mesh, and zeros do not.
        lanes = Lanes(load(first_tile * it.rows) + zeros, zeros, zeros, zeros)
        tiles_here = jnp.minimum(each, tiles - first_tile)
        groups, _ = tile.divided(tiles_here, ahead)
        lanes = lax.fori_loop(np.int32(0), groups, several(ahead, 0), lanes)
        done = groups * ahead
        lanes = lax.fori_loop(np.int32(0), tiles_here - done, several(1, done), lanes)
        count = zeros + tiles_here.astype(jnp.float32)
        is_last = (i == slices - 1).astype(jnp.int32)
        if left:
            row = lax.broadcasted_iota(jnp.int32, zeros.shape, 0)
            more = (row >= it.rows - left * is_last).astype(jnp.float32)

            def add_last(_: Array, lanes: Lanes) -> Lanes:
                last = load(max(0, rows - it.rows))
                return _extended(lanes, [last], count, more)

            lanes = lax.fori_loop(np.int32(0), is_last, add_last, lanes)
            count = count + more
        total = (tiles_here * it.rows + left * is_last).astype(jnp.float32)
        for ref, value in zip(outputs, _merged(lanes, count, total), strict=True):
            tile.store(ref.at[member, i, here], value)

    outputs = [((ensemble, kept, channels), jnp.float32)] * 3
    parts = tile.call(body, [x], outputs, ensemble * slices * blocks)
    if slices == 1:
        return parts
    counts = each * it.rows, rows - (slices - 1) * each * it.rows
    return _merge(parts, slices, counts, merging)


def _merge(
    parts: Sequence[Array], slices: int, counts: tuple[int, int], it: Tile
) -> list[Array]:
    """Returns the merged moments of slices; `counts`: rows of a slice, and of the last."""
    ensemble, kept, channels = parts[0].shape
    blocks, rows = channels // it.columns, (slices - 1) * counts[0] + counts[1]

    def body(program: Array, *refs: Ref) -> None:
        member, block = tile.divided(program, blocks)
        here = tile.span(block * it.columns, it.columns)
        row = lax.broadcasted_iota(jnp.int32, (kept, it.columns), 0)
        count = jnp.where(row < slices - 1, *map(np.int32, counts))
        count = jnp.where(row < slices, count, np.int32(0))
        # Rows beyond the slices are uninitialised memory.
        mean, m2, rest = (
            jnp.where(row < slices, tile.load(ref.at[member, tile.span(0, kept), here], it), v)
            for ref, v in zip(refs[:3], (-jnp.inf, 0.0, 0.0), strict=True)
        )
        lanes = Lanes(mean, m2, rest, jnp.zeros_like(rest))
        merged = _merged(lanes, count.astype(jnp.float32), jnp.float32(rows))
        for ref, value in zip(refs[3:], merged, strict=True):
            tile.store(ref.at[member, 0, here], value)

    outputs = [((ensemble, 1, channels), jnp.float32)] * 3
    return tile.call(body, parts, outputs, ensemble * blocks)


def _narrow(channels: int) -> tuple[int, int]:
    """Returns `wide` and `lanes` of a tile of many rows that divides `channels` columns."""
    wide = min(4, channels & -channels)
    return wide, 2 if channels % 8 == 0 else 1


def _extended(lanes: Lanes, values: Sequence[Array], count: Array, new: Array | int) -> Lanes:
    """Returns the lanes, which have read `count` values, extended by the values of some tiles.
    `new` is the number of tiles or, for a single tile, 0 or 1 for each lane."""
    mean, m2, rest, m2_rest = lanes
    away = [value - mean for value in values]
    if not isinstance(new, int):
        away = [jnp.where(new > 0, away[0], rest)]
    average = _tree_sum(away) * (1 / len(values))
    share, step = new / jnp.maximum(count + new, 1), average - rest
    squares = _tree_sum([(a - average) * (a - average) for a in away])
    mean, rest = two_sum(mean, rest + step * share)
    # m2 has a rest, because after an outlier all later squares are rounded to the ulp of m2.
    m2, lost = two_sum(m2, squares + step * (step * (count * share)))
    return Lanes(mean, m2, rest, m2_rest + lost)


def _merged(lanes: Lanes, count: Array, total: Array) -> tuple[Array, Array, Array]:
    """Returns mean, m2 and mean_rest of columns of `total` values, of which the lanes have read
    `count`. As in `reference.statistics`, the mean is computed twice, first relative to the
    largest mean of a lane, which may be an outlier, and then relative to the result."""

    def spread(column: Array) -> Array:
        return lax.broadcast_in_dim(column, count.shape, (1,))

    mean, m2, rest, m2_rest = lanes
    k = spread(mean.max(0))
    mean = jnp.where(count > 0, mean, k)
    m = k + spread(_sum(count * ((mean - k) + rest)) / total)
    d = (mean - m) + rest
    sum_d = _sum(count * d)
    # An infinite m2 has no rest.
    m2 = jnp.where(m2 < jnp.inf, m2 + m2_rest, m2)
    m2 = _sum(m2 + count * d * d) - sum_d * sum_d / total
    m2 = jnp.where(m2 < 0, 0, m2)  # not `maximum`, which may drop a NaN
    mean, rest = two_sum(m.max(0), sum_d / total)
    return mean, m2, rest


def _sum(lanes: Array) -> Array:
    # Without "+ 0", the product of a lane is contracted into its first addition, unrounded, but
    # not the product of its neighbour: both lanes would store sums with different last bits.
    return tile.sum_along(lanes + 0.0, 0)


def _tree_sum(values: Sequence[Array]) -> Array:
    """Returns the sum, added in pairs, so that rounding grows only with the tree's depth."""
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = [*pairs, *values[len(pairs) * 2 :]]
    return values[0]
