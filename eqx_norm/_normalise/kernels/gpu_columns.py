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

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from eqx_norm._jax.arithmetic import two_sum

from . import tile
from .availability import Ref, refusal
from .tile import Index, Tile

_HELD = 32  # values of x that a thread loads at once, at most
# Programs, at least; and up to twice as many if their results are a small part of x.
_PROGRAMS, _LITTLE = 2 * tile.CORES, 1 / 25
_ROWS = 128  # lanes of a column that a program of the second kernel merges with wide loads

OfLanes = Float32[Array, "rows columns"]  # a number for each lane: for each value of a tile
OfColumns = Float32[Array, " columns"]
# Mean, m2 and mean_lo, of slices of the rows and of all rows.
Parts = list[Float32[Array, "ensemble slices channels"]]
Moments = list[Float32[Array, "ensemble 1 channels"]]


class Lanes(NamedTuple):
    """Holds the moments of each lane, both to twice the precision of a float: the mean is
    `mean_hi + mean_lo`, and m2 is `m2_hi + m2_lo`."""

    mean_hi: OfLanes
    m2_hi: OfLanes
    mean_lo: OfLanes
    m2_lo: OfLanes


class Plan(NamedTuple):
    """Divides x, (ensemble, rows, channels), among programs. Each reads one slice of the rows
    of one block of channels, tile by tile."""

    tile: Tile
    blocks: int  # of channels, as many as a tile has columns
    tiles: int  # along the rows
    rows_left: int  # after the last tile
    together: int  # tiles that are loaded together
    slices: int
    slice_tiles: int  # in a slice; the last slice may have fewer

    @classmethod
    def of(cls, x: Float[Array, "ensemble rows channels"]) -> "Plan":
        """Returns the plan for x; raises `ValueError` if the kernel does not serve x."""
        ensemble, rows, channels = x.shape
        size = x.dtype.itemsize
        if rows > tile.MOST_ROWS:
            why_not = "it has more rows than a kernel can count"
            raise refusal(x, why_not, "ensemble, rows, channels")
        tiles = tile.tiles(channels, size, (4, 2, 1), lanes=4)
        # Mosaic cannot sum vectors of eight float32 over warps.
        fitting = [t for t in tiles if t.warps == 4 or t.width <= 4]
        if not fitting:
            raise refusal(x, "its number of channels is odd", "ensemble, rows, channels")
        of_x = fitting[0]
        blocks = channels // of_x.columns
        tiles, rows_left = divmod(rows, of_x.rows)
        together = max(1, min(_HELD // of_x.width, tiles))
        programs = _PROGRAMS // (blocks * ensemble)
        # A slice has three float32 for each channel, which are written once and read once.
        most = min(2 * programs, int(rows * size * _LITTLE) // (2 * 3 * 4))
        slice_tiles = max(together, -(-tiles // max(1, programs, most)))
        slices = max(1, -(-tiles // slice_tiles))
        return cls(of_x, blocks, tiles, rows_left, together, slices, slice_tiles)


def moments(x: Float[Array, "ensemble rows channels"]) -> Moments:
    """Returns mean, m2 and mean_lo of each channel, (ensemble, 1, channels)."""
    ensemble, rows, channels = x.shape
    plan = Plan.of(x)
    tile_rows, tile_columns = plan.tile.rows, plan.tile.columns
    if rows < tile_rows:
        # Copies of the first row fill a tile; they do not count.
        copies = jnp.repeat(x[:, :1], tile_rows - rows, 1)
        x = jnp.concatenate([copies, x], 1)

    def body(program: Int32[Array, ""], x: Ref, *outputs: Ref) -> None:
        member, i, block = tile.unravel(program, plan.slices, plan.blocks)
        first_tile = i * plan.slice_tiles
        columns = tile.span(block * tile_columns, tile_columns)

        def load(row: Index) -> OfLanes:
            return tile.load(x.at[member, tile.span(row, tile_rows), columns], plan.tile)

        def reading(number: int, start: Index) -> Callable[[Array, Lanes], Lanes]:
            """Returns the step of a loop from tile `start` on, by `number` tiles."""

            def step(i: Int32[Array, ""], lanes: Lanes) -> Lanes:
                done = start + i * number  # the number of tiles that the lanes have read
                values = [load((first_tile + done + j) * tile_rows) for j in range(number)]
                return _extended(lanes, values, done.astype(jnp.float32))

            return step

        zeros = tile.zeros((tile_rows, tile_columns), plan.tile)
        # Inside `shard_map`, loaded values vary over the mesh, and zeros do not.
        lanes = Lanes(load(first_tile * tile_rows) + zeros, zeros, zeros, zeros)
        tiles = jnp.minimum(plan.slice_tiles, plan.tiles - first_tile)  # of this slice

        # As many tiles together as fit into registers, then the others one by one.
        steps = lax.div(tiles, np.int32(plan.together))
        lanes = lax.fori_loop(np.int32(0), steps, reading(plan.together, 0), lanes)
        done = steps * plan.together
        lanes = lax.fori_loop(np.int32(0), tiles - done, reading(1, done), lanes)
        count = zeros + tiles.astype(jnp.float32)

        is_last = (i == plan.slices - 1).astype(jnp.int32)
        if plan.rows_left:
            # A last tile overlaps the one before: only its last rows are new.
            row = lax.broadcasted_iota(jnp.int32, zeros.shape, 0)
            is_new = (row >= tile_rows - plan.rows_left * is_last).astype(jnp.float32)

            def read_last(_: Array, lanes: Lanes) -> Lanes:
                last = load(max(0, rows - tile_rows))
                return _extended_where(lanes, last, count, is_new)

            lanes = lax.fori_loop(np.int32(0), is_last, read_last, lanes)
            count = count + is_new

        total = (tiles * tile_rows + plan.rows_left * is_last).astype(jnp.float32)
        for ref, values in zip(outputs, _merged(lanes, count, total), strict=True):
            tile.store(ref.at[member, i, columns], values)

    merging = _merging_tile(plan.slices, channels)
    kept = 1 if plan.slices == 1 else -(-plan.slices // merging.rows) * merging.rows
    output = jax.ShapeDtypeStruct((ensemble, kept, channels), jnp.float32)
    parts = tile.call(body, [x], [output] * 3, ensemble * plan.slices * plan.blocks)
    if plan.slices == 1:
        return parts
    slice_rows = plan.slice_tiles * tile_rows
    last_rows = rows - (plan.slices - 1) * slice_rows
    return _merge(parts, plan.slices, slice_rows, last_rows, merging)


def _merging_tile(slices: int, channels: int) -> Tile:
    """Returns a tile of the second kernel, which merges many rows of few columns."""
    if slices <= _ROWS and channels % 32 == 0:
        return Tile(width=4, lanes=8, warps=1)
    width = min(4, channels & -channels)
    return Tile(width, lanes=2 if channels % 8 == 0 else 1, warps=1)


def _merge(
    parts: Parts, slices: int, slice_rows: int, last_rows: int, merging: Tile
) -> Moments:
    """Returns the merged moments of slices of `slice_rows` rows, the last of `last_rows`."""
    ensemble, kept, channels = parts[0].shape
    blocks = channels // merging.columns
    rows = (slices - 1) * slice_rows + last_rows

    def body(
        program: Int32[Array, ""], mean: Ref, m2: Ref, mean_lo: Ref, *outputs: Ref
    ) -> None:
        member, block = tile.unravel(program, blocks)
        columns = tile.span(block * merging.columns, merging.columns)
        row = lax.broadcasted_iota(jnp.int32, (kept, merging.columns), 0)
        count = jnp.where(row < slices - 1, np.int32(slice_rows), np.int32(last_rows))
        count = jnp.where(row < slices, count, np.int32(0))

        def load(ref: Ref, otherwise: float) -> OfLanes:
            # Rows beyond the slices are uninitialised memory.
            values = tile.load(ref.at[member, tile.span(0, kept), columns], merging)
            return jnp.where(row < slices, values, otherwise)

        mean_hi, m2_hi = load(mean, -jnp.inf), load(m2, 0.0)
        lanes = Lanes(mean_hi, m2_hi, load(mean_lo, 0.0), jnp.zeros_like(m2_hi))
        merged = _merged(lanes, count.astype(jnp.float32), jnp.float32(rows))
        for ref, values in zip(outputs, merged, strict=True):
            tile.store(ref.at[member, 0, columns], values)

    output = jax.ShapeDtypeStruct((ensemble, 1, channels), jnp.float32)
    return tile.call(body, parts, [output] * 3, ensemble * blocks)


def _extended(lanes: Lanes, tiles: Sequence[OfLanes], count: Float32[Array, ""]) -> Lanes:
    """Returns the lanes, which have read `count` values, extended by the values of tiles."""
    distances = [values - lanes.mean_hi for values in tiles]
    return _extended_by(lanes, distances, count, len(tiles))


def _extended_where(lanes: Lanes, values: OfLanes, count: OfLanes, is_new: OfLanes) -> Lanes:
    """Returns the lanes, extended by the values of one tile where `is_new` is 1, not 0."""
    distance = values - lanes.mean_hi
    distance = jnp.where(is_new > 0, distance, lanes.mean_lo)
    return _extended_by(lanes, [distance], count, is_new)


def _extended_by(
    lanes: Lanes,
    distances: Sequence[OfLanes],
    count: Float32[Array, "..."],
    number: Float32[Array, "..."] | int,
) -> Lanes:
    """Returns the lanes, extended by a `number` of values of these distances from `mean_hi`."""
    mean_hi, m2_hi, mean_lo, m2_lo = lanes
    average = _tree_sum(distances) * (1 / len(distances))
    share = number / jnp.maximum(count + number, 1)
    delta = average - mean_lo
    squares = _tree_sum([(d - average) * (d - average) for d in distances])
    mean_hi, mean_lo = two_sum(mean_hi, mean_lo + delta * share)
    # After an outlier all later squares are rounded to the ulp of m2_hi.
    m2_hi, error = two_sum(m2_hi, squares + delta * (delta * (count * share)))
    return Lanes(mean_hi, m2_hi, mean_lo, m2_lo + error)


def _merged(
    lanes: Lanes, count: OfLanes, total: Float32[Array, ""]
) -> tuple[OfColumns, OfColumns, OfColumns]:
    """Returns mean, m2 and mean_lo of columns of `total` values, of which the lanes have read
    `count`. As in `reference.statistics`, the mean is computed twice, first relative to the
    largest mean of a lane, which may be an outlier, and then relative to the result."""

    def to_lanes(column: OfColumns) -> OfLanes:
        return lax.broadcast_in_dim(column, count.shape, (1,))

    k = to_lanes(lanes.mean_hi.max(0))
    mean_hi = jnp.where(count > 0, lanes.mean_hi, k)
    m = k + to_lanes(_sum(count * ((mean_hi - k) + lanes.mean_lo)) / total)
    d = (mean_hi - m) + lanes.mean_lo
    sum_d = _sum(count * d)
    # An infinite m2 has no error.
    m2 = jnp.where(lanes.m2_hi < jnp.inf, lanes.m2_hi + lanes.m2_lo, lanes.m2_hi)
    m2 = _sum(m2 + count * d * d) - sum_d * sum_d / total
    m2 = jnp.where(m2 < 0, 0, m2)  # not `maximum`, which may drop a NaN
    mean, mean_lo = two_sum(m.max(0), sum_d / total)
    return mean, m2, mean_lo


def _sum(lanes: OfLanes) -> OfColumns:
    # Without "+ 0", the product of a lane is contracted into its first addition, unrounded, but
    # not the product of its neighbour: both lanes would store sums with different last bits.
    return tile.sum_along(lanes + 0.0, 0)


def _tree_sum(values: Sequence[OfLanes]) -> OfLanes:
    """Returns the sum, added in pairs, so that rounding grows only with the tree's depth."""
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = [*pairs, *values[len(pairs) * 2 :]]
    return values[0]
