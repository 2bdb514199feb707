"""What a program of each Mosaic kernel does, with the references that `pallas_mosaic` gives it.

A program is one warpgroup, 128 threads. It calculates in float32, whatever it reads.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from . import pallas_triton_lanes as lanes_of
from . import reference
from .pallas_mosaic_activations import known
from .pallas_mosaic_ring import STAGES, Ring, layout, pl, plgpu
from .pallas_triton_lanes import Lanes, Places, Totals
from .pallas_triton_tiles import Columns
from .reference import Activation


def statistics_kernel(columns: Columns, *refs: Any) -> None:
    x_ref, mean_ref, rest_ref, m2_ref, slots, arrived = refs
    ring = Ring(columns, [x_ref], [slots], arrived)
    ring.fill()
    ring.wait(np.int32(0))
    # A lane that has no first value has no other.
    zero = _zero(columns)
    lanes = Lanes(jnp.float32(0), ring.tile(0, np.int32(0), 0), zero, zero)

    def step(lanes: Lanes, chunk: Any, places: Places) -> Lanes:
        @pl.when(chunk > 0)
        def _() -> None:
            ring.wait(chunk)

        tiles = [ring.tile(0, chunk, u) for u in range(len(places))]
        return lanes_of.extended(lanes, tiles, places)

    # Up to the chunk that is not whole all lanes have the same count.
    lanes = _over_chunks(ring, step, lanes, lambda lanes: lanes._replace(n=lanes.n + zero))
    results = lanes_of.merged(lanes, 0)
    _write(ring, (mean_ref, rest_ref, m2_ref), results[1:])


def sums_kernel(columns: Columns, *refs: Any, activation: Activation | None) -> None:
    vectors = 2 if activation is None else 4
    x_ref, g_ref = refs[:2]
    *outputs, x_slots, g_slots, arrived = refs[2 + vectors :]
    ring = Ring(columns, [x_ref, g_ref], [x_slots, g_slots], arrived)
    ring.fill()
    mean, rest, *affine = (_vector(ring, ref) for ref in refs[2 : 2 + vectors])
    slope = known(functools.partial(reference.slope, activation))

    def step(totals: Totals, chunk: Any, places: Places) -> Totals:
        ring.wait(chunk)
        gs, ds = [], []
        for u in range(len(places)):
            x, g = ring.tile(0, chunk, u), ring.tile(1, chunk, u)
            if activation is not None:
                g = slope(g, *affine, x, mean, rest)
            gs.append(g)
            ds.append(reference.centred(x, mean, rest))
        gs, ds = lanes_of.counted(gs, places), lanes_of.counted(ds, places)
        return lanes_of.added(totals, gs, [g * d for g, d in zip(gs, ds, strict=True)])

    zero = _zero(columns)
    totals = _over_chunks(ring, step, Totals(zero, zero, zero, zero))
    _write(ring, outputs, [lanes_of.total(sum_, 0) for sum_ in (totals.g, totals.gd)])


def merge_kernel(columns: Columns, *refs: Any, merge: Callable[..., Sequence[Array]]) -> None:
    *arrays, arrived = refs
    # As many come in as go out, and each has its slots.
    inputs = len(arrays) // 3
    ring = Ring(columns, arrays[:inputs], arrays[2 * inputs :], arrived)
    outputs = arrays[inputs : 2 * inputs]
    ring.fill()
    ring.wait(np.int32(0))
    partial = ring.slice * columns.tiling.lanes + _row(columns)
    within = partial < columns.length
    results = [jnp.where(within, ring.tile(i, np.int32(0), 0), 0) for i in range(inputs)]
    _write(ring, outputs, merge(partial, *results))


def merged_moments(
    length: int, each: int, partial: Array, *moments: Array
) -> tuple[Array, ...]:
    """Of `length` values, `each` partial result has so many, except for the last."""
    count = jnp.clip(length - partial * each, 0, each).astype(jnp.float32)
    return lanes_of.merged(Lanes(count, *moments), 0)[1:]


def merged_sums(partial: Array, *sums: Array) -> list[Array]:
    del partial
    return [lanes_of.total(sum_, 0) for sum_ in sums]


# --- What they are made of.


def _over_chunks(
    ring: Ring,
    step: Callable[[Any, Any, Places], Any],
    carry: Any,
    before_tail: Callable[[Any], Any] = lambda carry: carry,
) -> Any:
    """`carry = step(carry, chunk, places)` for each chunk of the slice."""
    tiles = ring.columns.tiling

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
    places = [None] * full + [_row(ring.columns) < rest] * (rest > 0)
    return run(ring.whole, ring.last, places, before_tail(carry))


def _row(columns: Columns) -> Array:
    """The number of the row, in the shape of a tile."""
    shape = columns.tiling.lanes, columns.tiling.across
    return plgpu.layout_cast(lax.broadcasted_iota(np.int32, shape, 0), layout(columns))


def _zero(columns: Columns) -> Array:
    shape = columns.tiling.lanes, columns.tiling.across
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout(columns))


def _vector(ring: Ring, ref: Any) -> Array:
    """The values of this program's channels, in the shape of a tile."""
    vector = plgpu.load(ref.at[ring.member, ring.own], optimized=False)
    tiles = ring.columns.tiling
    vector = lax.broadcast_in_dim(vector, (tiles.lanes, tiles.across), (1,))
    return plgpu.layout_cast(vector, layout(ring.columns))


def _write(ring: Ring, refs: Sequence[Any], results: Sequence[Array]) -> None:
    for ref, result in zip(refs, results, strict=True):
        # Not optimized: in a merge it is less than a line.
        plgpu.store(ref.at[ring.member, ring.slice, ring.own], result, optimized=False)
