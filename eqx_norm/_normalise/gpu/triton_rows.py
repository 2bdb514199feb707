"""Normalises rows by their own moments with kernels for GPUs: each reads a row once.

`rows` and `rows_vjp` compute what the primitives `rows.ROWS` and `rows.ROWS_VJP` compute, for
rows that the registers of one program hold. Forward, a program reads some rows, finds their
moments as `reference.statistics` does, and writes them normalised. Backward, it goes through
more of them, one after the other, and adds up what weight and bias get; another kernel merges
those sums, in a fixed order.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from eqx_norm._normalise import reference

from . import tiling
from .lanes import Places, total, tree_sum, zeroed
from .tiles import Here, Rows
from .triton import Triton, both, call, flat, load, pl, read, triton


def rows(x: Array, *affine: Array, row: Any, interpret: bool = False) -> list[Array]:
    """Returns y; and mean, m2 and mean_rest of each row, in float32.

    `affine` is weight and bias, or nothing; `row` a `rows.Row`.
    """
    geometry = geometry_of(x, tiling.FORWARD)
    vector = (*x.shape[:-1], 1)
    shapes = [(geometry.view(x).shape, x.dtype), *[(geometry.partials, jnp.float32)] * 3]
    y, *vectors = call(
        functools.partial(_rows_kernel, geometry, row),
        [geometry.view(x), *(array.reshape(-1) for array in affine)],
        shapes,
        geometry.programs,
        geometry.tiling,
        "eqx_norm_rows",
        interpret,
    )
    return [y.reshape(x.shape), *(array.reshape(vector) for array in vectors)]


def rows_vjp(
    g: Array,
    x: Array,
    *others: Array,
    row: Any,
    learns: bool,
    shape: tuple[int, ...] | None = None,
    interpret: bool = False,
) -> list[Array]:
    """Returns the gradient of x, in its dtype; if it `learns`, of weight and bias, in float32.

    `others` are weight and bias, or neither; then mean, m2 and mean_rest.
    """
    del shape  # that of weight and bias
    *affine, mean, m2, mean_rest = others
    geometry = geometry_of(x, tiling.LEARNING if learns else tiling.BACKWARD)
    repeats = tiling.repeated(geometry.programs) if learns else 1
    programs = tiling.blocks(geometry.programs, repeats)
    shapes = [(geometry.view(x).shape, x.dtype)]
    if learns:
        shapes += [((1, programs, x.shape[-1]), jnp.float32)] * 2
    dx, *sums = call(
        functools.partial(_rows_vjp_kernel, geometry, row, repeats, learns),
        [
            *(geometry.view(array) for array in (x, g)),
            *(array.reshape(-1) for array in affine),
            *(array.reshape(-1, 1) for array in (mean, m2, mean_rest)),
        ],
        shapes,
        programs,
        geometry.tiling,
        "eqx_norm_rows_vjp",
        interpret,
    )
    if learns:
        sums = Triton(interpret).merged_sums(sums, (1, programs, x.shape[-1]))
    return [dx.reshape(x.shape), *(array.reshape(affine[0].shape) for array in sums)]


def geometry_of(x: Any, held: int) -> Rows:
    """Returns how rows are read, if `held` numbers are kept for each value."""
    count, values = math.prod(x.shape[:-1]), x.shape[-1]
    return Rows(count, 1, 1, values, tiling.whole_rows(values, x.dtype.itemsize, held))


# --- What a program does.


def _rows_kernel(geometry: Rows, row: Any, x_ref: Any, *refs: Any) -> None:
    affine_refs, y_ref, moment_refs = refs[:-4], refs[-4], refs[-3:]
    here = geometry.here(pl.program_id(0))
    places, n = _places(geometry, here), geometry.length
    x = read(geometry, here, x_ref, here.start, places)

    def over_row(tiles: Sequence[Array]) -> Array:
        return total(tree_sum(zeroed(tiles, places)), 1)[:, None]

    # As `reference.statistics`, step by step.
    k = load(x_ref, (here.own, np.int32(0)), here.exists)
    m = k + over_row([tile - k for tile in x]) / n
    d = [tile - m for tile in x]
    sum_d, sum_d2 = over_row(d), over_row([tile * tile for tile in d])
    c = sum_d / n
    mean = m + c
    mean_rest = c - (mean - m)
    m2 = sum_d2 - sum_d * c
    m2 = jnp.where(m2 < 0, 0, m2)
    for ref, vector in zip(moment_refs, (mean, m2, mean_rest), strict=True):
        triton.store(ref.at[here.partial], vector.reshape(-1), mask=flat(here.exists))

    rstd = lax.rsqrt(m2 / n + row.eps)
    for u, (tile, (weight, bias)) in enumerate(
        zip(x, _affine(geometry, here, affine_refs, places), strict=True)
    ):
        y = reference.activated(row.activation, bias, rstd * weight, tile, mean, mean_rest)
        _store(geometry, here, y_ref, u, y, places)


def _rows_vjp_kernel(
    geometry: Rows,
    row: Any,
    repeats: int,
    learns: bool,
    x_ref: Any,
    g_ref: Any,
    *refs: Any,
) -> None:
    affine_refs, refs = (refs[:2], refs[2:]) if len(refs) > 4 + 2 * learns else ((), refs)
    moment_refs, (dx_ref, *sum_refs) = refs[:3], refs[3:]
    program, n = pl.program_id(0), geometry.length
    first = geometry.here(program * repeats)
    places = _places(geometry, first)
    # The same for all rows, and so read once.
    affine = _affine(geometry, first, affine_refs, places)

    def step(i: Any, sums: list[list[Array]]) -> list[list[Array]]:
        here = geometry.here(program * repeats + i)
        x = read(geometry, here, x_ref, here.start, places)
        g = read(geometry, here, g_ref, here.start, places)
        mean, m2, mean_rest = (
            load(ref, (here.own, np.int32(0)), here.exists) for ref in moment_refs
        )
        rstd = lax.rsqrt(m2 / n + row.eps)
        if row.activation is not None:
            g = [
                reference.activation_jvp(
                    g, bias, rstd * weight, x, mean, mean_rest, activation=row.activation
                )
                for g, x, (weight, bias) in zip(g, x, affine, strict=True)
            ]
        # An activation may have no derivative where there is nothing.
        g = zeroed(g, [both(place, here.exists) for place in places])
        x_hat = [reference.centred(tile, mean, mean_rest) * rstd for tile in x]
        h = [weight * tile for (weight, _), tile in zip(affine, g, strict=True)]
        products = zeroed([a * b for a, b in zip(h, x_hat, strict=True)], places)
        mean_h, mean_hx = (total(tree_sum(v), 1)[:, None] / n for v in (h, products))
        for u, (tile, along) in enumerate(zip(h, x_hat, strict=True)):
            dx = rstd * ((tile - mean_h) - along * mean_hx)
            _store(geometry, here, dx_ref, u, dx, places)
        if not learns:
            return sums
        by_weight = [a * b for a, b in zip(g, x_hat, strict=True)]
        return [
            [a + b for a, b in zip(old, new, strict=True)]
            for old, new in zip(sums, (by_weight, g), strict=True)
        ]

    zero = jnp.zeros((geometry.tiling.across, geometry.tiling.lanes), jnp.float32)
    sums = [[zero] * len(places) for _ in sum_refs]
    if repeats == 1:
        sums = step(np.int32(0), sums)
    else:
        left = jnp.minimum(geometry.programs - program * repeats, repeats)
        sums = lax.fori_loop(np.int32(0), left, step, sums)
    for ref, tiles in zip(sum_refs, sums, strict=True):
        for u, tile in enumerate(tiles):
            along = _along(geometry, first, u).reshape(-1)
            index = (np.int32(0), program, along)
            triton.store(ref.at[index], total(tile, 0), mask=flat(places[u]))


def _places(geometry: Rows, here: Here) -> Places:
    lanes, length = geometry.tiling.lanes, geometry.length
    return [
        None if (u + 1) * lanes <= length else _along(geometry, here, u) < length
        for u in range(geometry.tiling.unroll)
    ]


def _along(geometry: Rows, here: Here, u: int) -> Array:
    return here.lane + u * geometry.tiling.lanes


def _affine(
    geometry: Rows, here: Here, refs: Sequence[Any], places: Places
) -> list[tuple[Array, Array]]:
    """Returns weight and bias for each tile: 1 and 0, if there are none."""
    if not refs:
        zero = jnp.zeros(here.lane.shape, jnp.float32)
        return [(zero + 1, zero)] * len(places)
    weight, bias = (
        [load(ref, (_along(geometry, here, u),), place) for u, place in enumerate(places)]
        for ref in refs
    )
    return list(zip(weight, bias, strict=True))


def _store(geometry: Rows, here: Here, ref: Any, u: int, tile: Array, places: Places) -> None:
    index = geometry.values(here, _along(geometry, here, u))
    mask = both(places[u], here.exists)
    triton.store(ref.at[index], tile.astype(ref.dtype), mask=mask)
