"""Runs the kernels of `passes` by Pallas's Mosaic GPU backend, from an H100 on.

It is to replace Triton's, which jax will remove, and serves columns that fill whole lines,
without a mask. The work is cut up as it is for Triton; but values are copied ahead to shared
memory, not loaded by each thread. A program is one warpgroup, 128 threads.

It reads its slice chunk after chunk. The copy engine of the GPU (TMA) writes each chunk to a
slot of shared memory, and tells a barrier when it is there; while the threads work on one
chunk, the copies of the next are under way. Say 4 slots and 6 chunks: chunks 0 to 3 are asked
for at once; then, as often as a chunk was read, the fourth after it is asked for in its slot.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from . import activations, passes, tiling
from .lanes import Lanes, Places
from .passes import Backend, Inputs, Kernel
from .tiles import Geometry, geometry

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

# The bytes of a line of memory. A tile is one wide: its rows are copied whole.
_LINE = 128
# Of programs there are no more along one axis.
_PROGRAMS = 2**16 - 1
# The first that is known to lower these kernels: 0.10.2 fails to infer in which registers a
# tile is ("This is a bug"); 0.11 was not tried.
VERSION = (0, 12)
# The first GPUs that copy ahead by themselves: H100.
_CAPABILITY = (9, 0)


class Mosaic(Backend):
    """Runs kernels for which the GPU copies ahead; `interpret` may be `InterpretGPUParams`."""

    # What there is to do for a warpgroup at least, 8 channels at a time.
    least_merged = TILE // 8
    # There is nothing as good for it.
    lacking = frozenset(("pow",))

    def refuses(self, x: Any, mask: Any) -> str | None:
        if plgpu is None or jax.__version_info__ < VERSION:
            least = ".".join(map(str, VERSION))
            return f"the Mosaic kernels take jax {least}, and this is jax {jax.__version__}"
        if (too_old := _too_old()) is not None:
            return f"a Mosaic kernel runs on an H100 or a later GPU, and this is {too_old}"
        if mask is not None:
            return "a Mosaic kernel takes no mask"
        across = _LINE // x.dtype.itemsize
        if x.shape[-2] % across:
            return (
                f"a Mosaic kernel reads tiles of {across} channels of {x.dtype}, "
                f"and x has {x.shape[-2]}"
            )
        if tiling.by_rows(x.shape):
            return (
                "a Mosaic kernel reads channels side by side, "
                f"and x of shape {x.shape} has rows"
            )
        reading = geometry(x, 2)
        programs = max(reading.ensemble, reading.tiling.slices)
        if x.shape[-3] * x.shape[-1] > passes.MOST or programs > _PROGRAMS:
            return passes.too_many(x)
        return None

    def call(
        self, kernel: Kernel, reading: Geometry, inputs: Inputs, results: int, name: str
    ) -> list[Array]:
        def run(*refs: Any) -> None:
            parts = inputs.split(refs, results, len(inputs.arrays), 1)
            arrays, vectors, _, outputs, slots, (arrived,) = parts
            program = _Program(reading, arrays, slots, arrived, vectors, outputs)
            program.fill()
            kernel(program)

        tiles = reading.tiling
        # As the operands do, results vary over the axes of a mesh.
        varies = jax.typeof(inputs.arrays[-1]).manual_axis_type
        # A merge copies 4 rows at least; in those that nobody wrote, it does not look.
        slices = 1 if tiles.slices == 1 else tiling.blocks(tiles.slices, 4) * 4
        shape = reading.ensemble, slices, reading.channels
        out = jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varies)
        interpret = plgpu.InterpretGPUParams() if self.interpret is True else self.interpret
        return plgpu.kernel(
            run,
            out_type=[out] * results,
            scratch_types=_scratch(reading, [array.dtype for array in inputs.arrays]),
            grid=(reading.ensemble, tiles.slices, reading.channels // tiles.across),
            grid_names=GRID,
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
                # Room for one sum by each thread, of as many values as it holds of a row.
                reduction_scratch_bytes=TILE * 4,
            ),
            kernel_name=name,
            interpret=interpret,
        )(*inputs.arrays, *inputs.vectors)


BACKEND = Mosaic()


def _too_old() -> str | None:
    """Returns the name of the GPU here, if it is older than those that copy ahead."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:  # compiled for one elsewhere
        return None
    capability = tuple(int(part) for part in device.compute_capability.split("."))
    return device.device_kind if capability < _CAPABILITY else None


# --- One program.


@dataclasses.dataclass
class _Program:
    """Reads and writes for a `passes.Kernel`, to which a chunk is its number.

    It has `arrays` copied, all read together, to their slots; all of them are references.
    """

    columns: Geometry
    arrays: Sequence[Any]
    slots: Sequence[Any]
    arrived: Any
    vector_refs: Sequence[Any]
    outputs: Sequence[Any]
    waited: bool = False  # for the first chunk, before all others
    axis = 0

    def over_chunks(self, step: Callable[[Any, Any, Places], Any], carry: Any) -> Any:
        def run(first: Any, end: Any, places: Places, carry: Any) -> Any:
            def body(chunk: Any, carry: Any) -> Any:
                carry = step(carry, chunk, places)
                # All threads have read the slot, also for the eyes of the copy engine.
                plgpu.commit_smem()
                self.ask(chunk + STAGES)
                return carry

            return lax.fori_loop(first, end, body, carry)

        tiles = self.columns.tiling
        carry = run(np.int32(0), self.whole, [None] * tiles.unroll, carry)
        if not self.tail:
            return carry
        full, rest = divmod(self.tail, tiles.lanes)
        places = [None] * full + [self._row() < rest] * (rest > 0)
        zero = self.zero()
        carry = jax.tree.map(lambda value: value if value.ndim else value + zero, carry)
        return run(self.whole, self.last, places, carry)

    def tiles(self, chunk: Any, places: Places) -> Iterator[list[Array]]:
        if self.waited:
            pl.when(chunk > 0)(lambda: self.wait(chunk))
        else:
            self.wait(chunk)
        # One by one, as they are used: they lie in shared memory.
        for number in range(len(places)):
            yield self._tiles(chunk, number)

    def counted(self, chunk: Any, places: Places) -> Places:
        del chunk
        return places

    def vectors(self) -> list[Array]:
        vectors = (
            plgpu.load(ref.at[self.member, self.own], optimized=False)
            for ref in self.vector_refs
        )
        shape = self.columns.tile
        return [self.laid_out(lax.broadcast_in_dim(vector, shape, (1,))) for vector in vectors]

    def partials(self) -> tuple[Array, Array, list[Array]]:
        first = np.int32(0)
        self.wait(first)
        partial = self.slice * self.columns.tiling.lanes + self._row()
        within = partial < self.columns.length
        # What is in those that nobody wrote may be no number.
        return partial, within, [jnp.where(within, tile, 0) for tile in self._tiles(first, 0)]

    def zero(self) -> Array:
        return self.laid_out(jnp.zeros(self.columns.tile, jnp.float32))

    def no_lanes(self, masked: bool) -> Lanes:
        del masked
        self.wait(np.int32(0))
        self.waited = True
        # A lane that has no first value has no other.
        (shift,) = self._tiles(np.int32(0), 0)
        zero = self.zero()
        # Up to the chunk that is not whole all lanes have the same count.
        return Lanes(jnp.float32(0), shift, zero, zero)

    def restated(self, function: Callable[..., Array]) -> Callable[..., Array]:
        return activations.restated(function)

    def write(self, results: Sequence[Array]) -> None:
        for ref, result in zip(self.outputs, results, strict=True):
            # Not optimized: in a merge it is less than a line.
            index = self.member, self.slice, self.own
            plgpu.store(ref.at[index], result, optimized=False)

    def _tiles(self, chunk: Any, number: int) -> list[Array]:
        """Returns a tile of each array's chunk, in float32."""
        lanes = self.columns.tiling.lanes
        tiles = (slots[_slot(chunk), pl.ds(number * lanes, lanes)] for slots in self.slots)
        return [self.laid_out(tile).astype(jnp.float32) for tile in tiles]

    def _row(self) -> Array:
        """Returns the number of each row, in the shape of a tile."""
        return self.laid_out(lax.broadcasted_iota(np.int32, self.columns.tile, 0))

    # --- Copies to the slots.

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

    def wait(self, chunk: Any) -> None:
        """Waits until this chunk has arrived: once for each, or a barrier is ahead."""
        plgpu.barrier_wait(self.arrived.at[_slot(chunk)])

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


def _scratch(columns: Geometry, dtypes: list[Any]) -> list[Any]:
    """Returns the shared memory that slots for arrays of these dtypes takes."""
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
