"""Floating-point arithmetic of which compilers must not change the rounding."""

from jax import lax
from jaxtyping import Array, Inexact


def uncontracted(value: Inexact[Array, "*shape"]) -> Inexact[Array, "*shape"]:
    """Returns `value`, which LLVM cannot contract: fuse, as a product, with a sum.

    XLA recomputes a vector in each loop that uses the vector. In some of these loops LLVM fuses
    a product and a sum into one operation, which rounds once. The result would then differ from
    the number whose rounding error was computed: https://github.com/openxla/xla/issues/41579.
    (Selecting a constant NaN would stop programs under `jax_debug_nans` that have no NaN. XLA
    removes an `optimization_barrier` before LLVM runs; once XLA keeps it, the barrier is the
    better way.)
    """
    return lax.select(value != value, -value, value)


def two_sum(
    a: Inexact[Array, "..."], b: Inexact[Array, "..."]
) -> tuple[Inexact[Array, "..."], Inexact[Array, "..."]]:
    """Returns the rounded sum a + b and its exact rounding error (Knuth, 1969)."""
    total = a + b
    added = total - a
    return total, (a - (total - added)) + (b - added)
