"""Sums two arrays on a GPU in one reduction of one array.

XLA:GPU fuses the computation of an array into the reductions that read the array if its cost
model says so. The model counts the arithmetic once for each operand of the reduction, with 467
operations for a tanh and 79 for an exponential. `reference.sums` needs two sums of a derivative
of an activation, so XLA would write the derivative to memory first, in float32. Two float32
packed into one uint64 are one operand, and packing costs no arithmetic. (Complex numbers would
be one operand, too, but are read one by one.)
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from eqx_norm._normalise.formulas import reference

_BITS = np.uint64(32)
_UNCUT, _PARTS = 2**12, 2**5


def packed_sums(arrays: Sequence[Array], axes: Sequence[int]) -> tuple[Array, ...]:
    """Returns one sum per array, as a `reference.Reduction`, rounded as by `cut_sums`."""
    is_pair = len(arrays) == 2 and all(array.dtype == jnp.float32 for array in arrays)
    # XLA's own sums are faster along rows.
    return cut_sums(arrays, axes, _together if is_pair and 0 in axes else reference.xla_sums)


def cut_sums(
    arrays: Sequence[Array], axes: Sequence[int], sums: reference.Reduction = reference.xla_sums
) -> tuple[Array, ...]:
    """Returns one sum per array, as a `reference.Reduction`; few rows are summed in two steps:
    XLA cuts only sums of more than `_UNCUT` rows, and else writes the operand to memory."""
    shape, inner = arrays[0].shape, axes[1:]
    rows = math.prod(shape[axis] for axis in axes)
    parts = shape[0] if inner else math.gcd(rows, _PARTS)
    if 0 not in axes or rows > _UNCUT or not 1 < parts <= rows // _PARTS:
        return sums(arrays, axes)
    if not inner:
        arrays, inner = [a.reshape(parts, -1, *shape[1:]) for a in arrays], [1]
    # Without a barrier XLA would merge the two steps.
    of_parts = [*map(lax.optimization_barrier, sums(arrays, inner))]
    kept = [1 if axis in axes else n for axis, n in enumerate(shape)]
    return tuple(v.reshape(kept) for v in reference.xla_sums(of_parts, [0]))


def _together(arrays: Sequence[Array], axes: Sequence[int]) -> tuple[Array, ...]:
    with jax.enable_x64(True):
        both = lax.reduce(_packed(*arrays), np.uint64(0), _add, tuple(axes))
        return tuple(lax.expand_dims(v, tuple(axes)) for v in _unpacked(both))


def _add(a: Array, b: Array) -> Array:
    return _packed(*map(lax.add, _unpacked(a), _unpacked(b)))


def _packed(high: Array, low: Array) -> Array:
    bits = (lax.bitcast_convert_type(v, jnp.uint32).astype(jnp.uint64) for v in (high, low))
    return (next(bits) << _BITS) | next(bits)


def _unpacked(pair: Array) -> tuple[Array, Array]:
    halves = (pair >> _BITS, pair)
    high, low = (lax.bitcast_convert_type(v.astype(jnp.uint32), jnp.float32) for v in halves)
    return high, low
