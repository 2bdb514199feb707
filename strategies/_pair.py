"""Calculates with pairs of floats, whose sum is a number to twice the precision."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact

Share = Float[Array, "*#shape"]


class Pair(NamedTuple):
    """Represents the number `value + rest`; `rest` is the rounding error of `value`."""

    value: Inexact[Array, "*shape"]
    rest: Inexact[Array, "*shape"]


def rounded(value: Array) -> Array:
    """Returns `value`, rounded: LLVM cannot make it the product in a fused multiply-add.

    XLA computes a vector again in each loop that uses it, and in some of these loops LLVM fuses
    a product and a sum into one operation, which rounds once. Then the result would differ from
    the number whose rounding error was computed. An `optimization_barrier` does not help: XLA
    removes it before LLVM runs. (jax 0.10.2 and 0.12.0.1.)
    """
    return lax.select(value != value, lax.full_like(value, jnp.nan), value)


def two_sum(a: Array, b: Array) -> Pair:
    """Returns the rounded sum a + b and its exact rounding error (Knuth, 1969), which is 0 in
    exact arithmetic and so has the derivative 0."""
    total = a + b
    added = total - a
    return Pair(total, lax.stop_gradient((a - (total - added)) + (b - added)))


def between(a: Pair, b: Pair, kept: Share, share: Share) -> Pair:
    """Returns `kept * a + share * b`, where `kept + share = 1`. It starts from the number with
    the larger weight and adds the smaller weight times the distance to the other. So nothing
    cancels if a weight is near 1, and equal numbers, or the one with weight 1, are returned to
    the bit."""
    near_b = kept < share
    step = jnp.where(near_b, kept, -share).astype(a.value.dtype)
    near = (jnp.where(near_b, of_b, of_a) for of_a, of_b in zip(a, b, strict=True))
    return moved(Pair(*near), step, a, b)


def moved(start: Pair, step: Array | float, a: Pair, b: Pair) -> Pair:
    """Returns `start + step * (a - b)`, exact up to the rounding of the product."""
    product = rounded(step * (a.value - b.value))
    return two_sum(start.value, product + (start.rest + step * (a.rest - b.rest)))
