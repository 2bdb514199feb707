"""What a program of each kernel does. It gets references to arrays as `Geometry.view` has them.

A program calculates in float32, whatever it reads.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from . import pallas_triton_lanes as lanes_of
from . import reference
from .pallas_triton_lanes import Lanes, Places, Totals
from .pallas_triton_tiles import Columns, Geometry, Here, Index
from .reference import Activation

try:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton
except ImportError:  # jax has announced that it will remove it
    pl = triton = cast(Any, None)


def statistics_kernel(geometry: Geometry, masked: bool, *refs: Any) -> None:
    x_ref, *mask_ref = refs[: 1 + masked]
    here = geometry.here(pl.program_id(0))

    def tiles_from(start: Array, places: Places) -> list[Array]:
        return read(geometry, here, x_ref, start, places)

    lanes = _no_lanes(geometry, masked)
    if not masked and geometry.tiling.chunks > 1:
        # A lane that has no first value has no other.
        (first,) = tiles_from(here.start, [_within(geometry, here, here.start)])
        lanes = lanes._replace(shift=first)

    def step(lanes: Lanes, start: Array, places: Places) -> Lanes:
        tiles = tiles_from(start, places)
        if masked:
            places = _read_mask(geometry, here, mask_ref[0], start, places)
            lanes = lanes_of.started(lanes, tiles, places)
        elif geometry.tiling.chunks == 1:
            lanes = lanes._replace(shift=tiles[0])
        return lanes_of.extended(lanes, tiles, places)

    lanes = _over_chunks(geometry, here, step, lanes)
    results = lanes_of.merged(lanes, geometry.axis)
    _write(here, refs[1 + masked :], results if masked else results[1:])


def sums_kernel(
    geometry: Geometry, activation: Activation | None, masked: bool, *refs: Any
) -> None:
    x_ref, g_ref, *vector_refs = refs[: 4 if activation is None else 6]
    mask_ref = refs[2 + len(vector_refs)] if masked else None
    here = geometry.here(pl.program_id(0))
    mean, rest, *affine = (load(ref, here.vector, here.exists) for ref in vector_refs)

    def step(totals: Totals, start: Array, places: Places) -> Totals:
        xs = read(geometry, here, x_ref, start, places)
        gs = read(geometry, here, g_ref, start, places)
        if mask_ref is not None:
            places = _read_mask(geometry, here, mask_ref, start, places)
        if activation is not None:
            gs = [
                reference.slope(activation, g, *affine, x, mean, rest)
                for g, x in zip(gs, xs, strict=True)
            ]
        gs = lanes_of.counted(gs, places)
        ds = lanes_of.counted([reference.centred(x, mean, rest) for x in xs], places)
        return lanes_of.added(totals, gs, [g * d for g, d in zip(gs, ds, strict=True)])

    zero = jnp.zeros(_tile_shape(geometry), jnp.float32)
    totals = _over_chunks(geometry, here, step, Totals(zero, zero, zero, zero))
    results = [lanes_of.total(sum_, geometry.axis) for sum_ in (totals.g, totals.gd)]
    _write(here, refs[2 + len(vector_refs) + masked :], results)


def merge_kernel(
    columns: Columns, inputs: int, merge: Callable[..., Sequence[Array]], *refs: Any
) -> None:
    here = columns.here(pl.program_id(0))
    partial = here.start + here.lane
    within = _within(columns, here, here.start)
    index, exists = columns.values(here, partial), both(within, here.exists)
    results = merge(partial, within, *(load(ref, index, exists) for ref in refs[:inputs]))
    _write(here, refs[inputs:], results)


def merged_moments(
    counts: Callable[[Array], Array] | None, partial: Array, within: Array, *moments: Array
) -> tuple[Array, Array, Array, Array]:
    """`counts` tells the first of the moments, where it was not written."""
    if counts is not None:
        moments = (jnp.where(within, counts(partial), 0).astype(jnp.float32), *moments)
    return lanes_of.merged(Lanes(*moments), Columns.axis)


def merged_sums(partial: Array, within: Array, *sums: Array) -> list[Array]:
    del partial, within
    return [lanes_of.total(sum_, Columns.axis) for sum_ in sums]


# --- What they are made of.


def _over_chunks(
    geometry: Geometry, here: Here, step: Callable[[Any, Array, Places], Any], carry: Any
) -> Any:
    """`carry = step(carry, start, places)` for each chunk of the slice."""
    tiling, length = geometry.tiling, geometry.length

    def bounded(start: Array) -> Places:
        return [
            None
            # Known while tracing, if there is but one slice.
            if length % tiling.chunk == 0
            or (tiling.slices == tiling.chunks == 1 and (u + 1) * tiling.lanes <= length)
            else _within(geometry, here, start + u * tiling.lanes)
            for u in range(tiling.unroll)
        ]

    if tiling.chunks == 1:
        return step(carry, here.start, bounded(here.start))
    whole = last = np.int32(tiling.chunks)
    if length % tiling.slice:
        left = jnp.minimum(length - here.start, tiling.slice)
        chunk = jnp.full_like(left, tiling.chunk)
        whole, last = lax.div(left, chunk), lax.div(left + (tiling.chunk - 1), chunk)

    def run(first: Any, end: Any, places: Callable[[Array], Places], carry: Any) -> Any:
        def body(i: Array, carry: Any) -> Any:
            start = here.start + i * tiling.chunk
            return step(carry, start, places(start))

        return lax.fori_loop(first, end, body, carry)

    carry = run(np.int32(0), whole, lambda start: [None] * tiling.unroll, carry)
    return run(whole, last, bounded, carry) if length % tiling.chunk else carry


def _within(geometry: Geometry, here: Here, start: Array) -> Array:
    return start + here.lane < geometry.length


def read(geometry: Geometry, here: Here, ref: Any, start: Array, places: Places) -> list[Array]:
    """Tiles from `start` on, in float32; 0 where they have no place."""
    return [
        load(
            ref,
            geometry.values(here, start + u * geometry.tiling.lanes + here.lane),
            both(place, here.exists),
        )
        for u, place in enumerate(places)
    ]


def _read_mask(
    geometry: Geometry, here: Here, ref: Any, start: Array, places: Places
) -> Places:
    # In columns a mask has one value for all of them.
    exists = None if geometry.axis == 0 else here.exists
    return [
        load(
            ref,
            geometry.mask(here, start + u * geometry.tiling.lanes + here.lane),
            both(place, exists),
        )
        for u, place in enumerate(places)
    ]


def load(ref: Any, index: Index, mask: Array | None) -> Array:
    """A mask as it is, numbers in float32; 0 where `mask` is false."""
    if ref.dtype == jnp.bool_:
        other = None if mask is None else False
        return triton.load(ref.at[index], mask=mask, other=other)
    other = None if mask is None else 0.0
    return triton.load(ref.at[index], mask=mask, other=other).astype(jnp.float32)


def _write(here: Here, refs: Sequence[Any], results: Sequence[Array]) -> None:
    exists = None if here.exists is None else here.exists.reshape(-1)
    for ref, result in zip(refs, results, strict=True):
        triton.store(ref.at[here.partial], result, mask=exists)


def both(first: Array | None, second: Array | None) -> Array | None:
    if first is None or second is None:
        return first if second is None else second
    return first & second


def _no_lanes(geometry: Geometry, masked: bool) -> Lanes:
    shape = _tile_shape(geometry)
    # The other axis makes no difference to the count, unless rows have masks of their own.
    count = list(shape)
    if not (masked and geometry.axis == 1):
        count[1 - geometry.axis] = 1
    zero = jnp.zeros(shape, jnp.float32)
    return Lanes(jnp.zeros(count, jnp.float32), zero, zero, zero)


def _tile_shape(geometry: Geometry) -> tuple[int, int]:
    lanes, across = geometry.tiling.lanes, geometry.tiling.across
    return (lanes, across) if geometry.axis == 0 else (across, lanes)
