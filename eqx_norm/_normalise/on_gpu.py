"""Sums two arrays on a GPU in one reduction of one array.

XLA:GPU fuses the computation of an array into the reductions that read it if its
cost model says so. The model counts the arithmetic once for each operand of the reduction, with
467 operations for a tanh and 79 for an exponential. So XLA would write the derivative of an
activation, of which `reference.sums` needs two sums, to memory first, in float32. Two float32
packed into one uint64 are one operand, and packing costs no arithmetic. (Complex numbers would
be one operand, too, but are read one by one.)
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from . import reference

_BITS = np.uint64(32)


def total(arrays: Sequence[Array], axes: Sequence[int]) -> tuple[Array, ...]:
    """Returns one sum each, as a `reference.Total`, rounded as by `reference.plain`."""
    is_pair = len(arrays) == 2 and all(array.dtype == jnp.float32 for array in arrays)
    if not is_pair or 0 not in axes:  # along rows XLA does better
        return reference.plain(arrays, axes)
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
