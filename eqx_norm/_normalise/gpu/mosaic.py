"""The kernels of `passes` by Pallas's Mosaic GPU backend, from an H100 on.

It is to replace Triton's, which jax will remove, and serves columns that fill whole lines,
without a mask. The work is cut up as it is for Triton; but values are copied ahead to shared
memory (`mosaic_ring`), not loaded by each thread. A program is one warpgroup, 128 threads.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from . import activations, passes, tiling
from . import lanes as lanes_of
from .lanes import Lanes, Places
from .mosaic_ring import GRID, STAGES, TILE, Ring, layout, plgpu, scratch
from .passes import Backend, Kernel
from .tiles import Geometry, geometry

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
        self,
        kernel: Kernel,
        reading: Geometry,
        arrays: Sequence[Array],
        results: int,
        name: str,
        *,
        vectors: Sequence[Array] = (),
        mask: Sequence[Array] = (),
    ) -> list[Array]:
        del mask

        def run(*refs: Any) -> None:
            ends = itertools.accumulate((len(arrays), len(vectors), results, len(arrays), 1))
            parts = [refs[start:end] for start, end in itertools.pairwise((0, *ends))]
            inputs, vector_refs, outputs, slots, (arrived,) = parts
            ring = Ring(reading, inputs, slots, arrived)
            ring.fill()
            kernel(Program(ring, vector_refs, outputs))

        tiles = reading.tiling
        # As the operands do, results vary over the axes of a mesh.
        varies = jax.typeof(arrays[-1]).manual_axis_type
        # A merge copies 4 rows at least; in those that nobody wrote, it does not look.
        slices = 1 if tiles.slices == 1 else tiling.blocks(tiles.slices, 4) * 4
        shape = reading.ensemble, slices, reading.channels
        out = jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varies)
        interpret = plgpu.InterpretGPUParams() if self.interpret is True else self.interpret
        return plgpu.kernel(
            run,
            out_type=[out] * results,
            scratch_types=scratch(reading, [array.dtype for array in arrays]),
            grid=(reading.ensemble, tiles.slices, reading.channels // tiles.across),
            grid_names=GRID,
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
                # Room for one sum by each thread, of as many values as it holds of a row.
                reduction_scratch_bytes=TILE * 4,
            ),
            kernel_name=name,
            interpret=interpret,
        )(*arrays, *vectors)

    def merged_moments(
        self, partial: list[Array], reading: Geometry, masked: bool
    ) -> list[Array]:
        del masked
        each = reading.tiling.slice
        for columns in self.merges(reading.partials):
            merge = functools.partial(_merged_moments, reading.length, each)
            kernel = functools.partial(passes.merge_kernel, merge)
            partial = self.call(kernel, columns, partial, 3, "eqx_norm_merge_statistics")
            each *= columns.tiling.slice
        return [array[:, 0] for array in partial]

    def merged_sums(self, partial: list[Array], shape: tuple[int, int, int]) -> list[Array]:
        return [array[:, 0] for array in super().merged_sums(partial, shape)]


def _merged_moments(
    length: int, each: int, partial: Array, within: Array, *moments: Array
) -> tuple[Array, ...]:
    """Of `length` values, `each` partial result has so many, except for the last."""
    del within
    count = jnp.clip(length - partial * each, 0, each).astype(jnp.float32)
    return lanes_of.merged(Lanes(count, *moments), 0)[1:]


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
class Program:
    """Reads and writes by `passes.Program`; a chunk is given by its number."""

    ring: Ring
    vector_refs: Sequence[Any]
    outputs: Sequence[Any]
    waited: bool = False  # for the first chunk, before the others
    axis = 0

    def zero(self) -> Array:
        return self._laid_out(jnp.zeros(self.ring.columns.tile, jnp.float32))

    def no_lanes(self, masked: bool) -> Lanes:
        del masked
        self.ring.wait(np.int32(0))
        self.waited = True
        zero = self.zero()
        # Up to the chunk that is not whole all lanes have the same count.
        return Lanes(jnp.float32(0), self.ring.tile(0, np.int32(0), 0), zero, zero)

    def over_chunks(self, step: Callable[[Any, Any, Places], Any], carry: Any) -> Any:
        ring, tiles = self.ring, self.ring.columns.tiling

        def run(first: Any, end: Any, places: Places, carry: Any) -> Any:
            def body(chunk: Any, carry: Any) -> Any:
                carry = step(carry, chunk, places)
                # All threads have read the slot, also for the eyes of the copy engine.
                plgpu.commit_smem()
                ring.ask(chunk + STAGES)
                return carry

            return lax.fori_loop(first, end, body, carry)

        carry = run(np.int32(0), ring.whole, [None] * tiles.unroll, carry)
        if not ring.tail:
            return carry
        full, rest = divmod(ring.tail, tiles.lanes)
        places = [None] * full + [self._row() < rest] * (rest > 0)
        zero = self.zero()
        carry = jax.tree.map(lambda value: value if value.ndim else value + zero, carry)
        return run(ring.whole, ring.last, places, carry)

    def tiles(self, chunk: Any, places: Places) -> Iterator[list[Array]]:
        self.ring.wait(chunk, unless_first=self.waited)
        # One by one, as they are used: they wait in shared memory.
        for u in range(len(places)):
            yield [self.ring.tile(i, chunk, u) for i in range(len(self.ring.arrays))]

    def counted(self, chunk: Any, places: Places) -> Places:
        del chunk
        return places

    def vectors(self) -> list[Array]:
        return [self._vector(ref) for ref in self.vector_refs]

    def restated(self, function: Callable[..., Array]) -> Callable[..., Array]:
        return activations.restated(function)

    def partials(self) -> tuple[Array, Array, list[Array]]:
        ring, first = self.ring, np.int32(0)
        ring.wait(first)
        partial = ring.slice * ring.columns.tiling.lanes + self._row()
        within = partial < ring.columns.length
        tiles = [ring.tile(i, first, 0) for i in range(len(ring.arrays))]
        return partial, within, [jnp.where(within, tile, 0) for tile in tiles]

    def write(self, results: Sequence[Array]) -> None:
        for ref, result in zip(self.outputs, results, strict=True):
            # Not optimized: in a merge it is less than a line.
            index = self.ring.member, self.ring.slice, self.ring.own
            plgpu.store(ref.at[index], result, optimized=False)

    def _vector(self, ref: Any) -> Array:
        """Returns the values of this program's channels, in the shape of a tile."""
        vector = plgpu.load(ref.at[self.ring.member, self.ring.own], optimized=False)
        return self._laid_out(lax.broadcast_in_dim(vector, self.ring.columns.tile, (1,)))

    def _row(self) -> Array:
        """Returns the number of each row, in the shape of a tile."""
        return self._laid_out(lax.broadcasted_iota(np.int32, self.ring.columns.tile, 0))

    def _laid_out(self, tile: Array) -> Array:
        return plgpu.layout_cast(tile, layout(self.ring.columns))
