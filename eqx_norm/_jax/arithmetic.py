"""Floating-point arithmetic of which compilers must not change the rounding."""

from jax import lax
from jaxtyping import Array, Inexact


def uncontracted(value: Inexact[Array, "*shape"]) -> Inexact[Array, "*shape"]:
    """Returns `value`, which LLVM cannot contract: fuse, as a product, with a sum.

    XLA:CPU recomputes a vector in each loop that reads it, and in some of these loops LLVM
    contracts a product and a sum into one operation, which rounds once
    (https://github.com/openxla/xla/issues/41579; jax 0.10.2 and 0.12.0.1). The result would
    then differ from the number whose rounding error was computed. Unnecessary once XLA can be
    told not to contract. An `optimization_barrier` does not help with jax 0.10.2; with 0.12.0.1
    it does, but writes the product in a loop of its own. Without the selection
    tests/strategies/test_pair.py fails.
    """
    # A constant NaN in place of -value would stop programs under `jax_debug_nans`.
    return lax.select(value != value, -value, value)


def two_sum(
    a: Inexact[Array, "..."], b: Inexact[Array, "..."]
) -> tuple[Inexact[Array, "..."], Inexact[Array, "..."]]:
    """Returns the rounded sum a + b and its exact rounding error (Knuth, 1969)."""
    total = a + b
    added = total - a
    return total, (a - (total - added)) + (b - added)
