"""Runs kernels of Pallas' Mosaic GPU backend, on tiles with an explicit register layout.

Mosaic does not infer how the threads of a program should share a tile that is reduced. If the
load states this layout, Mosaic infers all other layouts. No load or store is masked: a block
that would pass the end of an array starts earlier. Checked with jax 0.11.2 and 0.12.0.1.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import TiledLayout
from jax.experimental.pallas import mosaic_gpu as _mosaic_gpu
from jaxtyping import Array

from eqx_norm._jax.lowering import like

from .availability import Ref

mosaic_gpu: Any = _mosaic_gpu  # the oldest jax lacks parts of this module
LANES, WARPS = 32, 4
THREADS = LANES * WARPS  # a warpgroup, which runs a program
CORES = 132  # of an H200
MOST_ROWS = 2**31 - 2**16  # whose numbers fit into 32 bits
_WIDEST = 16  # bytes that a thread loads at once, at most
_SCRATCH = 8192  # bytes of shared memory: a sum over warps of no more bytes waits once


class Tile(NamedTuple):
    """Describes how a program's threads cover a tile. `across` warps share a row, with `lanes`
    lanes of each and `wide` values per lane. Other warps and lanes cover the rows below."""

    wide: int
    lanes: int
    across: int

    @property
    def columns(self) -> int:
        return self.across * self.lanes * self.wide

    @property
    def rows(self) -> int:
        return THREADS // (self.across * self.lanes)

    @property
    def layout(self) -> Any:
        warp = LANES // self.lanes, self.lanes * self.wide
        # Both axes are cut for the warps (dims -6, -5), then for the lanes (-4, -3).
        cuts = mosaic_gpu.Tiling(((self.rows, self.columns), warp, (1, self.wide)))
        tiled = TiledLayout(cuts, (-6, -5), (-4, -3), -1, _check_canonical=False).canonicalize()
        how = tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim
        return mosaic_gpu.Layout.TILED(*how)


def tiles(
    columns: int, itemsize: int, across: Sequence[int], lanes: int = LANES
) -> Iterator[Tile]:
    """Yields the tiles that divide rows of `columns` values, the widest loads first."""
    power = columns & -columns
    for wide in (_WIDEST // itemsize, _WIDEST // itemsize // 2, _WIDEST // itemsize // 4):
        for warps in across:
            if power >= warps * wide:
                yield Tile(wide, min(lanes, power // (warps * wide)), warps)


def call(
    body: Callable[..., None], arrays: Sequence[Array], outputs: Sequence[Any], programs: int
) -> list[Array]:
    """Runs `body(program, *arrays, *outputs)` in each program and returns the `outputs`, which
    are given as pairs of a shape and a dtype."""
    kernel = mosaic_gpu.kernel(
        lambda *refs: body(lax.axis_index("program"), *refs),
        out_type=[like(arrays[0], *of) for of in outputs],
        grid=(programs,),
        grid_names=("program",),
        compiler_params=mosaic_gpu.CompilerParams(
            lowering_semantics=mosaic_gpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,  # no kernel reads its own results
            reduction_scratch_bytes=_SCRATCH,
        ),
    )
    return list(kernel(*arrays))


def load(ref: Ref, tile: Tile | None = None) -> Array:
    """Returns the values as float32; a vector needs no tile."""
    layout = None if tile is None else tile.layout
    return mosaic_gpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def zeros(shape: tuple[int, int], tile: Tile) -> Array:
    return mosaic_gpu.layout_cast(jnp.zeros(shape, jnp.float32), tile.layout)


def sum_along(values: Array, axis: int) -> Array:
    """Returns the sum of a tile along an axis. Each thread adds its values in order; a tree
    adds the sums of the threads."""
    return values.sum(axis)


def store(ref: Ref, value: Array) -> None:
    """Stores values, rounded to the reference's dtype."""
    value = value.astype(ref.dtype)
    if hasattr(mosaic_gpu, "store"):  # jax 0.12, whose plain stores need whole sectors
        mosaic_gpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def span(start: Array | int, size: int) -> Any:
    """Returns an index of `size` consecutive places."""
    return pl.ds(start, size)


def divided(number: Array, *sizes: int) -> list[Array]:
    """Returns the indices of element `number` of an array whose last axes have these sizes."""
    places: list[Array] = []
    for size in map(np.int32, sizes[::-1]):
        places.insert(0, lax.rem(number, size))
        number = lax.div(number, size)
    return [number, *places]
