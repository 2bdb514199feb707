"""Runs the kernels of `passes` by Pallas's Mosaic GPU backend, from an H100 on.

It is to replace Triton's, which jax will remove, and serves columns that fill whole lines,
without a mask. The work is cut up as it is for Triton; but values are copied ahead to shared
memory (`mosaic_ring`), not loaded by each thread. A program is one warpgroup, 128 threads.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from . import activations, passes, tiling
from .lanes import Lanes, Places
from .mosaic_ring import GRID, STAGES, TILE, Ring, plgpu, scratch
from .passes import Backend, Inputs, Kernel
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
            scratch_types=scratch(reading, [array.dtype for array in inputs.arrays]),
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
class _Program(Ring):
    """Reads and writes for a `passes.Kernel`, to which a chunk is its number."""

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
        self.wait(chunk, unless_first=self.waited)
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
        return [self.tile(i, chunk, number) for i in range(len(self.arrays))]

    def _row(self) -> Array:
        """Returns the number of each row, in the shape of a tile."""
        return self.laid_out(lax.broadcasted_iota(np.int32, self.columns.tile, 0))
