"""Calculates with pairs: numbers to twice the precision, each the sum of two floats."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact

Share = Float[Array, "*#shape"]


class Pair(NamedTuple):
    """Represents the number `value + rest`, where `rest` is what rounding took from `value`."""

    value: Inexact[Array, "*shape"]
    rest: Inexact[Array, "*shape"]


def rounded(value: Array) -> Array:
    """Returns `value`, rounded before it is used: never the product in a fused multiply-add.

    XLA computes a vector again in each loop that uses it, and in some of those loops LLVM
    fuses a product and a sum into one operation, which rounds once. Then the number returned
    would differ from the one whose rounding error was computed. An `optimization_barrier` does
    not help: XLA removes it before LLVM runs. (jax 0.10.2 and 0.12.0.1.)
    """
    return lax.select(value != value, lax.full_like(value, jnp.nan), value)


def two_sum(a: Array, b: Array) -> Pair:
    """Returns a + b, rounded, and the rounding error, which is exact (Knuth, 1969).

    In exact arithmetic the error is 0 for any a and b, so its derivative is 0.
    """
    total = a + b
    added = total - a
    return Pair(total, lax.stop_gradient((a - (total - added)) + (b - added)))


def between(a: Pair, b: Pair, kept: Share, share: Share) -> Pair:
    """Returns `kept * a + share * b`, where `kept + share = 1`.

    Starts from the number with the larger weight and adds the smaller weight times the
    distance to the other. So nothing cancels when a weight is near 1, equal numbers are
    returned as they are to the bit, and so is the one whose weight is 1.
    """
    near_b = kept < share
    step = jnp.where(near_b, kept, -share).astype(a.value.dtype)
    near = (jnp.where(near_b, of_b, of_a) for of_a, of_b in zip(a, b, strict=True))
    return moved(Pair(*near), step, a, b)


def moved(start: Pair, step: Array | float, a: Pair, b: Pair) -> Pair:
    """Returns `start + step * (a - b)`, as exact as the product is, which is rounded."""
    product = rounded(step * (a.value - b.value))
    return two_sum(start.value, product + (start.rest + step * (a.rest - b.rest)))
