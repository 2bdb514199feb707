"""Runs kernels of Pallas' Mosaic GPU backend, on tiles with an explicit register layout.

Mosaic does not infer how the threads of a program should share a tile that is reduced. If the
load states this layout, Mosaic infers all other layouts. No load or store is masked: a block
that would pass the end of an array starts earlier. Checked with jax 0.11.2 and 0.12.0.1.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import TiledLayout
from jax.experimental.pallas import mosaic_gpu as _mosaic_gpu
from jaxtyping import Array, Float32, Int32

from eqx_norm._jax.lowering import like

from .availability import Ref

mosaic_gpu: Any = _mosaic_gpu  # the oldest jax lacks parts of this module
Index = Int32[Array, ""] | int
LANES, WARPS = 32, 4
THREADS = LANES * WARPS  # a warpgroup, which runs a program
CORES = 132  # of an H200
MOST_ROWS = 2**31 - 2**16  # whose numbers fit into 32 bits
_WIDEST = 16  # bytes that a thread loads at once, at most
_SCRATCH = 8192  # bytes of shared memory: a sum over warps of no more bytes waits once


class Tile(NamedTuple):
    """Describes how a program's threads cover a tile: `warps` share a row, with `lanes` of
    each, and a lane loads `width` values at once. Other warps and lanes cover the rows
    below."""

    width: int
    lanes: int
    warps: int

    @property
    def columns(self) -> int:
        return self.warps * self.lanes * self.width

    @property
    def rows(self) -> int:
        return THREADS // (self.warps * self.lanes)

    @property
    def layout(self) -> object:
        """Returns the layout in registers, as Mosaic describes it."""
        of_program = self.rows, self.columns
        of_warp = LANES // self.lanes, self.lanes * self.width
        of_lane = 1, self.width
        tiling = mosaic_gpu.Tiling((of_program, of_warp, of_lane))
        # Both axes are cut for the warps (dims -6, -5), then for the lanes (-4, -3).
        tiled = TiledLayout(tiling, (-6, -5), (-4, -3), -1, _check_canonical=False)
        tiled = tiled.canonicalize()
        return mosaic_gpu.Layout.TILED(
            tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim
        )


def tiles(
    columns: int, itemsize: int, warps: Sequence[int], lanes: int = LANES
) -> Iterator[Tile]:
    """Yields the tiles that divide rows of `columns` values, the widest loads first; `warps`
    are the numbers of warps that may share a row."""
    power = columns & -columns  # the largest power of two that divides a row
    widest = _WIDEST // itemsize
    for width in (widest, widest // 2, widest // 4):
        for sharing in warps:
            if power >= sharing * width:
                yield Tile(width, min(lanes, power // (sharing * width)), sharing)


def call(
    body: Callable[..., None],
    arrays: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    programs: int,
) -> list[Array]:
    """Runs `body(program, *arrays, *outputs)` in each program and returns the outputs."""
    kernel = mosaic_gpu.kernel(
        lambda *refs: body(lax.axis_index("program"), *refs),
        out_type=[like(arrays[0], output.shape, output.dtype) for output in outputs],
        grid=(programs,),
        grid_names=("program",),
        compiler_params=mosaic_gpu.CompilerParams(
            lowering_semantics=mosaic_gpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,  # no kernel reads its own results
            reduction_scratch_bytes=_SCRATCH,
        ),
    )
    return list(kernel(*arrays))


def load(ref: Ref, tile: Tile | None = None) -> Float32[Array, "..."]:
    """Returns the values as float32; a vector needs no tile."""
    layout = None if tile is None else tile.layout
    return mosaic_gpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def zeros(shape: tuple[int, int], tile: Tile) -> Float32[Array, "rows columns"]:
    return mosaic_gpu.layout_cast(jnp.zeros(shape, jnp.float32), tile.layout)


def sum_along(values: Float32[Array, "rows columns"], axis: int) -> Float32[Array, " sums"]:
    """Returns the sum of a tile along an axis. Each thread adds its values in order; a tree
    adds the sums of the threads."""
    return values.sum(axis)


def store(ref: Ref, values: Float32[Array, "..."]) -> None:
    """Stores values, rounded to the reference's dtype."""
    rounded = values.astype(ref.dtype)
    if hasattr(mosaic_gpu, "store"):  # jax 0.12, whose plain stores need whole sectors
        mosaic_gpu.store(ref, rounded, optimized=False)
    else:
        ref[...] = rounded


def span(start: Index, size: int) -> pl.Slice | slice:
    """Returns an index of `size` consecutive places."""
    return pl.ds(start, size)


def unravel(number: Int32[Array, ""], *sizes: int) -> list[Int32[Array, ""]]:
    """Returns the indices of element `number` of an array; `sizes` are those of its axes after
    the first."""
    indices: list[Array] = []
    for size in reversed(sizes):
        indices.append(lax.rem(number, np.int32(size)))
        number = lax.div(number, np.int32(size))
    return [number, *reversed(indices)]
