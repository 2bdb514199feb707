"""Pairs: a number as the sum of two, of which the second holds what the first rounds away."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact

Pair = tuple[Inexact[Array, "*shape"], Inexact[Array, "*shape"]]
Share = Float[Array, "*#shape"]


def rounded(value: Array) -> Array:
    """Returns `value` as a number of its own, never half of a fused multiply-add.

    XLA computes a vector again in each loop that uses it, and in some of them LLVM makes one
    operation, rounded once, of a product and a sum: what is returned would not be what the
    rounding error was taken of. `optimization_barrier` is no help, it is gone by then. (jax
    0.10.2 and 0.12.0.1.)
    """
    return jnp.where(jnp.isnan(value), jnp.nan, value).astype(value.dtype)


def two_sum(a: Array, b: Array) -> Pair:
    """Returns a + b, rounded, and exactly what that has rounded away (Knuth, 1969).

    The second is 0 in exact arithmetic, whatever a and b, and so has no derivative.
    """
    total = a + b
    of_b = total - a
    return total, lax.stop_gradient((a - (total - of_b)) + (b - of_b))


def between(a: Pair, b: Pair, kept: Share, share: Share) -> Pair:
    """Returns `kept * a + share * b` for two parts of 1, as the nearest number and the rest.

    What is rounded is a product of the smaller part and the distance from a to b. So nothing
    cancels where a part is near 1, a = b stays as it is to the bit, and where one part is 0
    the other number is returned as it is.
    """
    (a_high, a_low), (b_high, b_low) = a, b
    to_b = kept < share
    step = jnp.where(to_b, kept, -share).astype(a_high.dtype)
    high, low = (jnp.where(to_b, b, a) for a, b in ((a_high, b_high), (a_low, b_low)))
    total, error = two_sum(high, rounded(step * (a_high - b_high)))
    low = (low + error) + step * (a_low - b_low)
    # What is left of a large number and a small one takes no more than this (Dekker, 1971).
    nearest = total + low
    return nearest, lax.stop_gradient(low - (nearest - total))
