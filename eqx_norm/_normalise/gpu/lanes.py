r"""Keeps moments and sums in the registers of one kernel.

A *tile* is a block of values that the threads of a program hold; its place for one value is a
*lane*. A program reads many tiles, several at a time, and each lane keeps the moments of what
passed through it; at the end the lanes of a channel are merged. Say tiles of 2 lanes, two at a
time, and the column 5, 7, 6, 8, 9, 5: the first lane sees (5, 6), then (9), the second
(7, 8), then (5). A lane starts from its own first value $k$, and from then on

$$\bar d = \tfrac{1}{n_u} \sum_u (x_u - k), \quad q = \sum_u \big(x_u - k - \bar d\big)^2$$

of the tiles at hand are merged into its own by Chan's formula. So no value is subtracted from
one that is far away, unless it is the lane's first that is far: then one lane in hundreds is
less exact than the others. In a constant channel every difference is 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

# For each tile, which of its values count; None where all do.
Places = Sequence[Array | None]


class Lanes(NamedTuple):
    """Holds the moments of each lane in the order of `Moments`: the mean is `shift + beyond`.

    `shift` is one of the lane's values, `None` before the first. Any of them may have size 1
    where it does not differ.
    """

    n: Array
    shift: Any
    m2: Array
    beyond: Array


class Totals(NamedTuple):
    """Holds two sums, and what rounding has added to each."""

    g: Array
    gd: Array
    excess_g: Array
    excess_gd: Array


def extended(lanes: Lanes, tiles: Sequence[Array], places: Places) -> Lanes:
    """Returns the lanes with the values of these tiles that count."""
    count, shift, m2, beyond = lanes
    deviations = [tile - shift for tile in tiles]
    if not any(place is not None for place in places):
        # Not a division, and exact where there are 2, 4 or 8.
        n, average = jnp.full_like(count, len(tiles)), tree_sum(deviations) * (1 / len(tiles))
    else:
        n = tree_sum(
            [jnp.ones_like(count) if p is None else p.astype(count.dtype) for p in places]
        )
        average = tree_sum(zeroed(deviations, places)) / jnp.maximum(n, 1)
    residues = zeroed([d - average for d in deviations], places)
    new_share = n / jnp.maximum(count + n, 1)
    step = average - beyond
    squares = tree_sum([residue * residue for residue in residues])
    m2 = m2 + (squares + step * step * (count * new_share))
    return Lanes(count + n, shift, m2, beyond + step * new_share)


def started(lanes: Lanes, tiles: Sequence[Array], places: Places) -> Lanes:
    """Returns the lanes, the empty ones with the first value that counts as their shift."""
    first = lanes.shift
    for tile, place in zip(reversed(tiles), reversed(places), strict=True):
        first = tile if place is None else jnp.where(place, tile, first)
    return lanes._replace(shift=jnp.where(lanes.n > 0, lanes.shift, first))


def merged(lanes: Lanes, axis: int) -> tuple[Array, Array, Array, Array]:
    """Returns count, mean, m2 and mean_rest of all lanes along an axis, which is gone.

    As in `reference.statistics`, the mean is found twice, from any of the shifts and from what
    that gave: then it does not matter that the shift may be an outlier.
    """
    shape = jnp.broadcast_shapes(*(value.shape for value in lanes))
    count, shift, m2, beyond = (jnp.broadcast_to(value, shape) for value in lanes)
    some = count > 0
    n = total(count, axis)
    safe = jnp.maximum(n, 1)
    k = jnp.where(n > 0, jnp.where(some, shift, -jnp.inf).max(axis), 0)
    from_k = jnp.where(some, (shift - jnp.expand_dims(k, axis)) + beyond, 0)
    m = k + total(count * from_k, axis) / safe
    d = jnp.where(some, (shift - jnp.expand_dims(m, axis)) + beyond, 0)
    sum_d = total(count * d, axis)
    c = sum_d / safe
    m2 = total(m2 + count * (d * d), axis) - sum_d * c
    # Not a maximum, which is a number in Triton even if m2 is not.
    m2 = jnp.where(m2 < 0, 0, m2)
    mean = m + c
    return n, mean, m2, c - (mean - m)


def total(values: Array, axis: int) -> Array:
    """Returns the sum over the lanes. Triton adds them in a tree."""
    return values.sum(axis)


def added(totals: Totals, g: Sequence[Array], gd: Sequence[Array]) -> Totals:
    """Returns the sums with these, compensated: a lane may add up thousands."""
    sum_g, excess_g = _added(totals.g, totals.excess_g, tree_sum(g))
    sum_gd, excess_gd = _added(totals.gd, totals.excess_gd, tree_sum(gd))
    return Totals(sum_g, sum_gd, excess_g, excess_gd)


def _added(old: Array, excess: Array, value: Array) -> tuple[Array, Array]:
    value = value - excess
    new = old + value
    return new, (new - old) - value


def zeroed(values: Sequence[Array], places: Places) -> list[Array]:
    """Returns the values in the places that count, 0 in the others."""
    return [
        value if place is None else jnp.where(place, value, 0)
        for value, place in zip(values, places, strict=True)
    ]


def tree_sum(values: Sequence[Any]) -> Any:
    """Returns the sum, added in pairs: rounding grows with the depth of a tree."""
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = [*pairs, *values[len(pairs) * 2 :]]
    return values[0]
