"""Defines `Pair`, which holds numbers to twice the precision of a float."""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Inexact

from eqx_norm._jax.arithmetic import two_sum, uncontracted
from eqx_norm._jax.constants import full

from ._numbers import Floats, cast

Numbers: TypeAlias = Inexact[Array, "*sets n"]
Parts: TypeAlias = Inexact[Array, "*sets 2 n"]
# Shapes that broadcast, to `Numbers` and to `Parts`.
Addend: TypeAlias = Inexact[Array, "*#sets #n"]
AddendParts: TypeAlias = Inexact[Array, "*#sets 2 #n"]
Share: TypeAlias = Inexact[Array, ""] | Addend
Words: TypeAlias = tuple[Numbers, Numbers]
Tangent: TypeAlias = Array | SymbolicZero


class Pair(NamedTuple):
    """Holds numbers as double-floats `value + rest`, where `rest` is the rounding error of
    `value`. (Inside of functions the two are `hi` and `lo`.)

    A float32 mean of 1e7 with a standard deviation of 1 would cause errors of up to 0.5 in the
    outputs of a layer, and a float32 running average would stop changing once its steps round
    to 0. Derivatives are those of `value`.

    Value and rest are in one array, because XLA computes an array in one loop. In two loops XLA
    may round a value in two ways, and `rest` would belong to the other value.

    **Fields:** `parts`, `(..., 2, n)`: n values, then their rests.
    """

    parts: Parts

    @staticmethod
    def of(value: "ArrayLike | Pair", rest: ArrayLike | None = None) -> "Pair":
        """Returns a vector or a number as a pair, with any `rest` that is small compared to
        `value`, by default 0; returns a `Pair` unchanged."""
        if isinstance(value, Pair):
            return value
        hi = jnp.asarray(value)
        if hi.ndim == 0:
            hi = lax.expand_dims(hi, [0])
        if rest is None:
            return Pair(append_zeros(uncontracted(hi)))
        return Pair(_stack(hi, jnp.asarray(rest, hi.dtype)))

    @staticmethod
    def zero(shape: tuple[int, ...], dtype: DTypeLike) -> "Pair":
        """Returns zeros; `shape` is that of `value`."""
        return Pair(full((*shape[:-1], 2, shape[-1]), 0, dtype))

    @property
    def value(self) -> Numbers:
        """Returns the numbers, each rounded to one float."""
        return _hi_and_lo(self.parts)[0]

    @property
    def rest(self) -> Numbers:
        """Returns the rounding errors of `value`, which are constants to derivatives."""
        return lax.stop_gradient(_hi_and_lo(self.parts)[1])

    # For pairs `+` adds numbers; for other named tuples it concatenates.
    def __add__(self, other: "ArrayLike | Pair") -> "Pair":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the sum with a pair, or with a float per number."""
        return Pair(_add(self.parts, Pair.of(other).parts))

    def __sub__(self, other: "ArrayLike | Pair") -> "Pair":
        """Returns the difference to a pair, or to a float per number."""
        return self + Pair(-Pair.of(other).parts)

    def towards(self, other: "Pair", share: Floats | float) -> "Pair":
        """Returns `(1 - share) * self + share * other`.

        Equal numbers, and an operand of weight 1, are returned to the bit.
        """
        starts_at_other, dtype = jnp.asarray(share > 0.5), self.parts.dtype
        ends = [*zip(self.words(dtype), other.words(dtype), strict=True)]
        hi, lo = (jnp.where(starts_at_other, b, a) for a, b in ends)
        end_hi, end_lo = (jnp.where(starts_at_other, a, b) for a, b in ends)
        share = jnp.where(starts_at_other, 1 - share, share)
        return lerp((hi, lo), (end_hi, end_lo), share)

    def astype(self, dtype: DTypeLike) -> "Pair":
        """Returns the numbers in another precision; digits that `value` loses go to `rest`."""
        return self if self.parts.dtype == dtype else Pair.of(*self.words(dtype))

    def words(self, dtype: DTypeLike) -> Words:
        """Returns value and rest in another precision, as two arrays, `(..., n)`."""
        value, rest = _hi_and_lo(self.parts)
        rest = lax.stop_gradient(rest)
        if self.parts.dtype == dtype:
            return value, rest
        hi = cast("mean", value, dtype)
        back = hi if jnp.iscomplexobj(self.parts) else hi.real
        lo = (value - back.astype(self.parts.dtype)) + rest
        return hi, lo.astype(dtype)


def lerp(start: Words, end: Words, share: Floats | float) -> Pair:
    """Returns `start + share * (end - start)`, accurate for a share of up to 0.5, and for any
    share if `start` is 0 or the difference is exact. (`Pair.towards` has no such limit.)

    Values and rests are separate arrays: XLA:CPU does not simplify a slice of a selection of
    parts, and would compute the selection for each slice.
    """
    return Pair(_lerp(*start, *end, jnp.asarray(share).astype(start[0].dtype)))


# The functions of parts have rules of their own, because JAX would trace the derivatives of all
# rounding errors, which are 0, and drop them later.
@jax.custom_jvp
def _add(a: AddendParts, b: AddendParts) -> Parts:
    return _double_float_sum(*_hi_and_lo(a), *_hi_and_lo(b))


@jax.custom_jvp
def _lerp(hi: Addend, lo: Addend, end_hi: Addend, end_lo: Addend, share: Share) -> Parts:
    step = uncontracted(share * (end_hi - hi))
    return _double_float_sum(hi, lo, step, share * (end_lo - lo))


def _double_float_sum(hi_a: Addend, lo_a: Addend, hi_b: Addend, lo_b: Addend) -> Parts:
    """Returns the sum of two double-floats, of which lo is small again (Dekker, 1971)."""
    total, error = two_sum(hi_a, hi_b)
    lo = lo_b + (error + lo_a)  # the error is 0 in exact arithmetic
    hi = total + lo
    return stack_by_selection(hi, lo - (hi - total))


def _add_jvp(
    primals: tuple[Array, Array], tangents: tuple[Tangent, Tangent]
) -> tuple[Array, Array]:
    y = _add(*primals)
    a, b = (
        jnp.broadcast_to(_instantiated(primal, tangent), y.shape)
        for primal, tangent in zip(primals, tangents, strict=True)
    )
    return y, a + b


def _lerp_jvp(primals: tuple[Array, ...], tangents: tuple[Tangent, ...]) -> tuple[Array, Array]:
    start, _, end, _, share = primals
    d_start, _, d_end, _, d_share = tangents
    y = _lerp(*primals)
    d_start, d_end = _instantiated(start, d_start), _instantiated(end, d_end)
    tangent = d_start + share * (d_end - d_start)  # equal tangents stay equal to the bit
    if not isinstance(d_share, SymbolicZero):
        tangent = tangent + d_share * (end - start)
    return y, append_zeros(tangent)


def _instantiated(primal: Array, tangent: Tangent) -> Array:
    return jnp.zeros_like(primal) if isinstance(tangent, SymbolicZero) else tangent


_add.defjvp(_add_jvp, symbolic_zeros=True)
_lerp.defjvp(_lerp_jvp, symbolic_zeros=True)


def _hi_and_lo(parts: Parts) -> tuple[Numbers, Numbers]:
    hi, lo = jnp.unstack(parts, axis=-2)
    return hi, lo


def _stack(hi: Numbers, lo: Numbers) -> Parts:
    axis = hi.ndim - 1
    return lax.concatenate([lax.expand_dims(part, [axis]) for part in (hi, lo)], axis)


def stack_by_selection(first: Numbers, second: Numbers) -> Parts:
    """Returns two arrays of shape `(..., n)` as one of shape `(..., 2, n)` that is read whole.

    XLA:CPU compiles a concatenate as a branch for each operand, and what the operands share in
    each branch: of the time that LLVM takes for a training step of a batch norm, the running
    averages took a fifth, by selections a tenth (jax 0.10.2). No issue upstream. With `_stack`
    tests/operation/test_on_cpu.py, `quick_to_compile`, fails. (XLA simplifies a slice of a
    concatenate, but not of a selection: `_stack` is for arrays of which each part is read by
    itself.)
    """
    axis = first.ndim - 1
    shape = (*first.shape[:axis], 2, *first.shape[axis:])
    axes = *range(axis), axis + 1
    is_first = lax.eq(lax.broadcasted_iota(np.int32, shape, axis), np.int32(0))
    first, second = (lax.broadcast_in_dim(part, shape, axes) for part in (first, second))
    return lax.select(is_first, first, second)


def append_zeros(hi: Numbers) -> Parts:
    """Returns the parts of a pair of which lo is 0."""
    # A pad, because JAX cannot map a stack of which only one array is split over a mesh.
    hi = jnp.expand_dims(hi, -2)
    after = [(0, int(axis == hi.ndim - 2), 0) for axis in range(hi.ndim)]
    return lax.pad(hi, jnp.zeros((), hi.dtype), after)


def clip_infinity(value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the value, or 3e38 for infinity, whose averages would be NaN. The selection also
    makes it `uncontracted`."""
    return lax.select(value == jnp.inf, lax.full_like(value, 3e38), value)
