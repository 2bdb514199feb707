"""Copies values ahead from memory into a ring of slots, for the kernels by Mosaic.

A program reads its slice chunk after chunk. The copy engine of the GPU (TMA) writes each chunk
to a slot of shared memory, and tells a barrier when it is there; while the threads work on one
chunk, the copies of the next are under way. Say 4 slots and 6 chunks: chunks 0 to 3 are asked
for at once; then, as often as a chunk was read, the fourth after it is asked for in its slot.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .tiles import Geometry

try:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu
except ImportError:
    pl = mosaic_gpu = cast(Any, None)
# Of one version there is not what there is of another.
plgpu: Any = mosaic_gpu

# While one chunk is read three are under way, of 8 kB or more. An H200's memory gives 4.8 TB/s
# about 1 us after it was asked: that takes 36 kB under way on each core, of two programs.
STAGES = 4
# Names of the axes along which there are programs. Those of the last are side by side, and so
# is what they read.
GRID = ("member", "slice", "block")
# A warpgroup's 128 threads hold 4 values each of a tile. (It can sum up no more at once: of 8,
# "Unoptimized configuration for cross-warp reduction", jax 0.12.0.1.)
_WIDE, TILE = 4, 512
_WARP = 32
# The values along an axis that one copy takes at most.
_COPIED = 256
# A copy is of a multiple of so many bytes: each thread tells the barrier of its share.
_SHARES = 128


@dataclasses.dataclass
class Ring:
    """Has `arrays` copied, all read together, to their slots; all of them are references."""

    columns: Geometry
    arrays: Sequence[Any]
    slots: Sequence[Any]
    arrived: Any

    @property
    def member(self) -> Array:
        return lax.axis_index("member")

    @property
    def slice(self) -> Array:
        return lax.axis_index("slice")

    @property
    def own(self) -> Any:
        """Returns this program's channels."""
        across = self.columns.tiling.across
        return pl.ds(lax.axis_index("block") * across, across)

    @property
    def tail(self) -> int:
        """Returns the length of the very last chunk if it is not whole, else 0."""
        return self.columns.length % self.columns.tiling.chunk

    @property
    def whole(self) -> Any:
        """Returns how many whole chunks there are in this slice."""
        tiles = self.columns.tiling
        if self.columns.length % tiles.slice == 0:
            return np.int32(tiles.chunks)
        left = jnp.minimum(self.columns.length - self.slice * tiles.slice, tiles.slice)
        return lax.div(left, jnp.full_like(left, tiles.chunk))

    @property
    def last(self) -> Any:
        """Returns how many chunks there are in it."""
        ends_here = self.slice == self.columns.tiling.slices - 1
        return self.whole + ends_here.astype(np.int32) if self.tail else self.whole

    def fill(self) -> None:
        """Has the first chunks copied, as many as there are slots."""
        for chunk in range(min(STAGES, self.columns.tiling.chunks)):
            self.ask(np.int32(chunk))

    def ask(self, chunk: Any) -> None:
        """Has this chunk copied to its slot, if there is such a chunk."""

        @pl.when(chunk < self.whole)
        def _() -> None:
            self._copy(chunk, self.columns.tiling.chunk)

        if self.tail:

            @pl.when((self.whole <= chunk) & (chunk < self.last))
            def _() -> None:
                self._copy(chunk, self.tail)

    def wait(self, chunk: Any, *, unless_first: bool = False) -> None:
        """Waits until this chunk has arrived: once for each, or a barrier is ahead."""
        if unless_first:
            pl.when(chunk > 0)(lambda: self.wait(chunk))
        else:
            plgpu.barrier_wait(self.arrived.at[_slot(chunk)])

    def tile(self, index: int, chunk: Any, number: int) -> Array:
        """Returns a tile of this array's chunk, in float32."""
        lanes = self.columns.tiling.lanes
        tile = self.slots[index][_slot(chunk), pl.ds(number * lanes, lanes)]
        return self.laid_out(tile).astype(jnp.float32)

    def laid_out(self, tile: Array) -> Array:
        """Returns the tile laid out as all are: 4 values a thread, warps below each other."""
        across = self.columns.tiling.across
        tiles = (TILE // across, across), (_WARP * _WIDE // across, across), (_WIDE,)
        layout = plgpu.Layout.TILED(
            plgpu.Tiling(tiles), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
        )
        return plgpu.layout_cast(tile, layout)

    def _copy(self, chunk: Any, rows: int) -> None:
        tiles, slot = self.columns.tiling, _slot(chunk)
        first = self.slice * tiles.slice + chunk * tiles.chunk
        for array, slots in zip(self.arrays, self.slots, strict=True):
            for start, size in _pieces(rows, tiles.across * array.dtype.itemsize):
                plgpu.copy_gmem_to_smem(
                    array.at[self.member, pl.ds(first + start, size), self.own],
                    slots.at[slot, pl.ds(start, size)],
                    self.arrived.at[slot],
                )


def scratch(columns: Geometry, dtypes: list[Any]) -> list[Any]:
    """Returns the shared memory that a ring for arrays of these dtypes takes."""
    tiles = columns.tiling
    stages = min(STAGES, tiles.chunks)
    pieces = sum(len(_pieces(tiles.chunk, tiles.across * d.itemsize)) for d in dtypes)
    return [
        *(plgpu.SMEM((stages, tiles.chunk, tiles.across), dtype) for dtype in dtypes),
        plgpu.Barrier(num_arrivals=pieces, num_barriers=stages),
    ]


def _slot(chunk: Any) -> Any:
    return lax.rem(chunk, jnp.full_like(chunk, STAGES))


def _pieces(rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Returns where the copies of so many rows start, and how long they are."""
    whole = -(-_SHARES // row_bytes)
    rows = -(-rows // whole) * whole
    return [(start, min(_COPIED, rows - start)) for start in range(0, rows, _COPIED)]
