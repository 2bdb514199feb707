"""Runs the kernels of `passes` by Pallas's Triton backend, from an A100 on.

It serves any shape: columns and rows, of any length, with or without a mask.

That backend is deprecated since jax 0.11 and says so wherever one of its kernels is lowered:
lower them under `choice.quiet()`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from . import passes
from .lanes import Lanes, Places
from .passes import Backend, Inputs, Kernel
from .tiles import Geometry, Here
from .tiling import Tiling

try:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton
except ImportError:  # jax has announced that it will remove it
    pl = triton = cast(Any, None)


class Triton(Backend):
    """Runs kernels in which each thread loads what it works on."""

    def refuses(self, x: Any, mask: Any) -> str | None:
        del mask
        if triton is None:
            return f"jax {jax.__version__} has no Pallas-Triton backend"
        if max(math.prod(x.shape[:-1]), x.shape[-3] * x.shape[-1]) > passes.MOST:
            return passes.too_many(x)
        return None

    def call(
        self, kernel: Kernel, reading: Geometry, inputs: Inputs, results: int, name: str
    ) -> list[Array]:
        def run(*refs: Any) -> None:
            here = reading.here(pl.program_id(0))
            kernel(_Program(reading, here, *inputs.split(refs, results)))

        return call(
            run,
            [array for arrays in inputs for array in arrays],
            [(reading.partials, jnp.float32)] * results,
            reading.programs,
            reading.tiling,
            name,
            self.interpret,
        )


def call(
    kernel: Callable[..., None],
    arrays: Sequence[Array],
    shapes: Sequence[tuple[tuple[int, ...], Any]],
    programs: int,
    tiles: Tiling,
    name: str,
    interpret: Any,
) -> list[Array]:
    """Returns what `programs` of the kernel write: arrays of these shapes and dtypes."""
    # As the operands do, results vary over the axes of a mesh.
    varies = jax.typeof(arrays[-1]).manual_axis_type
    outs = [jax.ShapeDtypeStruct(*s, manual_axis_type=varies) for s in shapes]
    # Nothing is copied ahead in shared memory: a chunk has its loads side by side.
    parameters = triton.CompilerParams(num_warps=tiles.warps, num_stages=1)
    return list(
        pl.pallas_call(
            kernel,
            out_shape=outs,
            grid=(programs,),
            compiler_params=parameters,
            interpret=interpret,
            name=name,
        )(*arrays)
    )


BACKEND = Triton()


# --- One program.


@dataclasses.dataclass(frozen=True)
class _Program:
    """Reads and writes for a `passes.Kernel`, to which a chunk is where it starts."""

    geometry: Geometry
    here: Here
    arrays: Sequence[Any]
    vector_refs: Sequence[Any]
    mask: Sequence[Any]
    outputs: Sequence[Any]

    @property
    def axis(self) -> int:
        return self.geometry.axis

    def zero(self) -> Array:
        return jnp.zeros(self.geometry.tile, jnp.float32)

    def no_lanes(self, masked: bool) -> Lanes:
        # The other axis makes no difference to the count, unless rows have masks of their own.
        count, zero = list(self.geometry.tile), self.zero()
        if not (masked and self.axis == 1):
            count[1 - self.axis] = 1
        if masked:
            shift = zero
        elif self.geometry.tiling.chunks == 1:
            shift = None
        else:
            ((shift,),) = self.tiles(self.here.start, [self._within(self.here.start)])
        return Lanes(jnp.zeros(count, jnp.float32), shift, zero, zero)

    def over_chunks(self, step: Callable[[Any, Any, Places], Any], carry: Any) -> Any:
        tiling, length, start = self.geometry.tiling, self.geometry.length, self.here.start

        def bounded(start: Array) -> Places:
            return [
                None
                # Known while tracing, if there is but one slice.
                if length % tiling.chunk == 0
                or (tiling.slices == tiling.chunks == 1 and (u + 1) * tiling.lanes <= length)
                else self._within(start + u * tiling.lanes)
                for u in range(tiling.unroll)
            ]

        if tiling.chunks == 1:
            return step(carry, start, bounded(start))
        whole = last = np.int32(tiling.chunks)
        if length % tiling.slice:
            left = jnp.minimum(length - start, tiling.slice)
            chunk = jnp.full_like(left, tiling.chunk)
            whole, last = lax.div(left, chunk), lax.div(left + (tiling.chunk - 1), chunk)

        def run(first: Any, end: Any, places: Callable[[Array], Places], carry: Any) -> Any:
            def body(i: Array, carry: Any) -> Any:
                at = start + i * tiling.chunk
                return step(carry, at, places(at))

            return lax.fori_loop(first, end, body, carry)

        carry = run(np.int32(0), whole, lambda _: [None] * tiling.unroll, carry)
        return run(whole, last, bounded, carry) if length % tiling.chunk else carry

    def tiles(self, chunk: Array, places: Places) -> list[tuple[Array, ...]]:
        # All are asked for before the first is used.
        arrays = [read(self.geometry, self.here, ref, chunk, places) for ref in self.arrays]
        return list(zip(*arrays, strict=True))

    def counted(self, chunk: Array, places: Places) -> Places:
        for mask in self.mask:
            places = read(self.geometry, self.here, mask, chunk, places)
        return places

    def vectors(self) -> list[Array]:
        return [load(ref, self.here.vector, self.here.exists) for ref in self.vector_refs]

    def restated(self, function: Callable[..., Array]) -> Callable[..., Array]:
        return function

    def partials(self) -> tuple[Array, Array, list[Array]]:
        partial = self.here.start + self.here.lane
        within = self._within(self.here.start)
        index, exists = self.geometry.values(self.here, partial), both(within, self.here.exists)
        return partial, within, [load(ref, index, exists) for ref in self.arrays]

    def write(self, results: Sequence[Array]) -> None:
        exists = flat(self.here.exists)
        for ref, result in zip(self.outputs, results, strict=True):
            triton.store(ref.at[self.here.partial], result, mask=exists)

    def _within(self, start: Array) -> Array:
        return start + self.here.lane < self.geometry.length


def read(geometry: Geometry, here: Here, ref: Any, start: Array, places: Places) -> list[Array]:
    """Returns tiles of numbers or of a mask from `start` on; 0 where they have no place."""
    is_mask, lanes = ref.dtype == jnp.bool_, geometry.tiling.lanes
    index = geometry.mask if is_mask else geometry.values
    # In columns a mask has one value for all of them.
    exists = None if is_mask and geometry.axis == 0 else here.exists
    return [
        load(ref, index(here, start + u * lanes + here.lane), both(place, exists))
        for u, place in enumerate(places)
    ]


def load(ref: Any, index: Any, mask: Array | None) -> Array:
    """Returns a mask as it is, numbers in float32; 0 where `mask` is false."""
    is_mask = ref.dtype == jnp.bool_
    other = None if mask is None else False if is_mask else 0.0
    loaded = triton.load(ref.at[index], mask=mask, other=other)
    return loaded if is_mask else loaded.astype(jnp.float32)


def both(first: Array | None, second: Array | None) -> Array | None:
    """Returns where both hold; `None` holds everywhere."""
    if first is None or second is None:
        return first if second is None else second
    return first & second


def flat(mask: Array | None) -> Array | None:
    """Returns the mask as a vector."""
    return None if mask is None else mask.reshape(-1)
