"""Defines `Pair`, which holds numbers to twice the precision of a float."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Inexact

from ._numbers import cast


class Pair(NamedTuple):
    """Holds numbers as pairs `value + rest`, where `rest` is the rounding error of `value`.

    A float32 mean of 1e7 with a standard deviation of 1 would cause errors of up to 0.5 in the
    outputs of a layer, and a float32 running average would stop changing once its steps round
    to 0. Derivatives are those of `value`.

    Value and rest are in one array, because XLA computes an array in one loop. In two loops XLA
    may round a value in two ways, and `rest` would belong to the other value.

    **Fields:** `parts`, `(..., 2, n)`: n values, then their rests.
    """

    parts: Inexact[Array, "*sets 2 n"]

    @staticmethod
    def of(value: "ArrayLike | Pair", rest: ArrayLike | None = None) -> "Pair":
        """Returns a vector or a number as a pair, with any `rest` that is small compared to
        `value`, by default 0; returns a `Pair` unchanged."""
        if isinstance(value, Pair):
            return value
        value = jnp.atleast_1d(value)
        if rest is None:
            return Pair(with_zeros(uncontracted(value)))
        return Pair(_stacked(value, jnp.asarray(rest, value.dtype)))

    @property
    def value(self) -> Inexact[Array, "*sets n"]:
        """Returns the numbers, each rounded to one float."""
        return self._part(0)

    @property
    def rest(self) -> Inexact[Array, "*sets n"]:
        """Returns the rounding errors of `value`, which are constants to derivatives."""
        return lax.stop_gradient(self._part(1))

    def _part(self, index: int) -> Array:
        return lax.index_in_dim(self.parts, index, self.parts.ndim - 2, keepdims=False)

    # For pairs `+` adds numbers; for other named tuples it concatenates.
    def __add__(self, other: "ArrayLike | Pair") -> "Pair":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the sum with a pair, or with a float per number."""
        return Pair(_sum(self.parts, Pair.of(other).parts))

    def __sub__(self, other: "ArrayLike | Pair") -> "Pair":
        """Returns the difference to a pair, or to a float per number."""
        return self + Pair(-Pair.of(other).parts)

    def towards(self, other: "Pair", share: Array | float) -> "Pair":
        """Returns `(1 - share) * self + share * other`.

        Equal numbers, and an operand of weight 1, are returned to the bit.
        """
        near = jnp.asarray(share > 0.5)
        of_parts = jnp.expand_dims(near, -2) if near.ndim > 1 else near
        start = Pair(jnp.where(of_parts, other.parts, self.parts))
        end = Pair(jnp.where(of_parts, self.parts, other.parts))
        return start.lerp(end, jnp.where(near, 1 - share, share))

    def lerp(self, other: "Pair", share: Array | float) -> "Pair":
        """Returns `self + share * (other - self)`, accurate for a share of up to 0.5, and for
        any share if `self` is 0 or the difference is exact. (`towards` has no such limit.)"""
        share = jnp.asarray(share).astype(self.parts.dtype)
        share = jnp.expand_dims(share, -2) if share.ndim else share
        return Pair(_lerp(self.parts, other.parts, share))

    def astype(self, dtype: DTypeLike) -> "Pair":
        """Returns the numbers in another precision; digits that `value` loses go to `rest`."""
        return self if self.parts.dtype == dtype else Pair.of(*self.words(dtype))

    def words(self, dtype: DTypeLike) -> tuple[Array, Array]:
        """Returns value and rest in another precision, as two arrays, `(..., n)`."""
        if self.parts.dtype == dtype:
            return self.value, self.rest
        value = cast("mean", self.value, dtype)
        back = value if jnp.iscomplexobj(self.parts) else value.real
        rest = (self.value - back.astype(self.parts.dtype)) + self.rest
        return value, rest.astype(dtype)


def uncontracted(value: Array) -> Array:
    """Returns `value`, which LLVM cannot contract: fuse, as a product, with a sum.

    XLA recomputes a vector in each loop that uses the vector. In some of these loops LLVM fuses
    a product and a sum into one operation, which rounds once. The result would then differ from
    the number whose rounding error was computed. (Selecting a constant NaN would stop programs
    under `jax_debug_nans` that have no NaN. XLA removes an `optimization_barrier` before LLVM
    runs; once XLA keeps it, the barrier is the better way.)
    """
    return lax.select(value != value, -value, value)


# The functions of parts have rules of their own, because JAX would trace the derivatives of all
# rounding errors, which are 0, and drop them later.
@jax.custom_jvp
def _sum(a: Array, b: Array) -> Array:
    return _added(*_both(a), *_both(b))


@jax.custom_jvp
def _lerp(start: Array, end: Array, share: Array) -> Array:
    # Value and rest are subtracted one by one: XLA:CPU would materialise a pair's parts.
    (value, rest), (to, rest_to) = _both(start), _both(end)
    share = lax.index_in_dim(share, 0, share.ndim - 2, keepdims=False) if share.ndim else share
    return _added(value, rest, uncontracted(share * (to - value)), share * (rest_to - rest))


def _both(parts: Array) -> tuple[Array, Array]:
    return Pair(parts)._part(0), Pair(parts)._part(1)


def _added(a: Array, rest_a: Array, b: Array, rest_b: Array) -> Array:
    total, error = two_sum(a, b)
    rest = rest_b + (error + rest_a)  # the error is 0 in exact arithmetic
    value = total + rest
    return _stacked(value, rest - (value - total))  # Dekker's sum: the rest is small


def _sum_jvp(primals: Any, tangents: Any) -> Any:
    y = _sum(*primals)
    a, b = (jnp.broadcast_to(t, y.shape) for t in map(_instantiated, primals, tangents))
    return y, a + b


def _lerp_jvp(primals: Any, tangents: Any) -> Any:
    (start, end, share), y = primals, _lerp(*primals)
    d_start, d_end = map(_instantiated, primals[:2], tangents)
    tangent = d_start + share * (d_end - d_start)  # equal tangents stay equal to the bit
    if not isinstance(tangents[2], SymbolicZero):
        tangent = tangent + tangents[2] * (end - start)
    return y, jnp.broadcast_to(tangent, y.shape)


def _instantiated(primal: Array, tangent: Any) -> Array:
    return jnp.zeros_like(primal) if isinstance(tangent, SymbolicZero) else tangent


_sum.defjvp(_sum_jvp, symbolic_zeros=True)
_lerp.defjvp(_lerp_jvp, symbolic_zeros=True)


def _stacked(value: Array, rest: Array) -> Array:
    axis = value.ndim - 1
    return lax.concatenate([lax.expand_dims(array, [axis]) for array in (value, rest)], axis)


def with_zeros(value: Array) -> Array:
    """Returns the parts of a pair with rests of 0."""
    # A pad, because JAX cannot map a stack of which only one array is split over a mesh.
    value = jnp.expand_dims(value, -2)
    after = [(0, int(axis == value.ndim - 2), 0) for axis in range(value.ndim)]
    return lax.pad(value, jnp.zeros((), value.dtype), after)


def clip_infinity(value: Array) -> Array:
    """Returns the value, `uncontracted`, or 3e38 for infinity, whose averages would be NaN."""
    return lax.select(value == jnp.inf, lax.full_like(value, 3e38), value)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns the rounded sum a + b and its exact rounding error (Knuth, 1969)."""
    total = a + b
    added = total - a
    return total, (a - (total - added)) + (b - added)
