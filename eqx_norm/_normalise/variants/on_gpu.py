"""Sums on a GPU: two arrays in one reduction of one array, and few rows in two steps.

XLA:GPU fuses the computation of an array into the reductions that read the array if its cost
model (gpu_hlo_cost_analysis.cc) says so. The model counts the arithmetic once for each operand
of the reduction. `reference.dot_products` needs two sums of a derivative of an activation, so
XLA would write the derivative to memory first, in float32. Two float32 packed into one uint64
are one operand, and packing costs no arithmetic. Without it BatchNorm with GELU moves 5
units more, with ReLU 2 (jax 0.12.0.1), and tests/operation/test_on_gpu.py,
`two_sums_over_examples`, fails. A reduction of a tuple does no better; complex numbers would be
one operand, too, but are read one by one. No issue upstream.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, UInt64

from eqx_norm._jax.lowering import Size
from eqx_norm._normalise.formulas import reference

_BITS = np.uint64(32)
# Sums of up to _UNCUT rows are cut into at least _FEW_PARTS parts of some _ROWS rows, or of
# more if at least _PARALLEL sums remain.
_UNCUT, _FEW_PARTS, _ROWS, _PARALLEL = 2**12, 2**3, 2**5, 2**15


def packed_sums(
    arrays: Sequence[Float[Array, "*x"]], axes: Sequence[int]
) -> tuple[Float[Array, "*#x"], ...]:
    """Returns one sum per array, as a `reference.Reduction`, rounded as by `cut_sums`."""
    is_pair = len(arrays) == 2 and all(array.dtype == jnp.float32 for array in arrays)
    if is_pair and 0 in axes:
        return cut_sums(arrays, axes, _sums_of_words)
    return cut_sums(arrays, axes)  # XLA's own sums are faster along rows


def cut_sums(
    arrays: Sequence[Float[Array, "*x"]],
    axes: Sequence[int],
    reduction: reference.Reduction = reference.xla_sums,
) -> tuple[Float[Array, "*#x"], ...]:
    """Returns one sum per array, as a `reference.Reduction`; few rows are summed in two steps:
    XLA cuts only sums of more than `_UNCUT` rows, and else writes the operand to memory."""
    shape, inner = arrays[0].shape, axes[1:]
    kept = [1 if axis in axes else n for axis, n in enumerate(shape)]
    rows = math.prod(shape[axis] for axis in axes)
    if 0 not in axes or rows > _UNCUT:
        return reduction(arrays, axes)
    if inner:
        parts = shape[0] if shape[0] <= rows // _ROWS else 1
    else:
        parts = _parts(rows, math.prod(kept))
    if parts == 1:
        return reduction(arrays, axes)
    if not inner:
        arrays = [a.reshape(parts, -1, *shape[1:]) for a in arrays]
        inner = [1]
    # Without a barrier XLA would merge the two steps.
    of_parts = [*map(lax.optimization_barrier, reduction(arrays, inner))]
    return tuple(v.reshape(kept) for v in reference.xla_sums(of_parts, [0]))


def _parts(rows: int, columns: Size) -> int:
    """Returns the number of equal parts in which to sum the rows, 1 for a sum in one step.

    XLA fuses an operand only if enough sums run at once (its gpu_performance_model.cc).
    LayerNorm of 512 rows of 768 moves 8.7 units in place of 16.2, BatchNorm of 4,000 rows of
    256 8.8 in place of 16.3 (jax 0.12.0.1). No issue upstream. Without it
    tests/layers/test_platforms.py, `few_rows_in_two_steps`, fails.
    """
    sizes = [n for n in range(_ROWS // 2, 4 * _ROWS + 1) if rows % n == 0]
    size = min(sizes, key=lambda n: abs(n - _ROWS), default=rows)
    if isinstance(columns, int):
        size = max([n for n in sizes if rows // n * columns >= _PARALLEL], default=size)
    # With fewer parts, another launch takes longer than moving so few rows.
    return rows // size if rows // size >= _FEW_PARTS else 1


def _sums_of_words(
    arrays: Sequence[Float32[Array, "*x"]], axes: Sequence[int]
) -> tuple[Float32[Array, "*#x"], ...]:
    """Returns the sums of two arrays by one reduction of words of 64 bits."""
    with jax.enable_x64(True):
        words = lax.reduce(_packed(*arrays), np.uint64(0), _add, tuple(axes))
        return tuple(lax.expand_dims(v, tuple(axes)) for v in _unpacked(words))


def _add(a: UInt64[Array, "*x"], b: UInt64[Array, "*x"]) -> UInt64[Array, "*x"]:
    """Adds the two numbers of each word."""
    return _packed(*map(lax.add, _unpacked(a), _unpacked(b)))


def _packed(a: Float32[Array, "*x"], b: Float32[Array, "*x"]) -> UInt64[Array, "*x"]:
    """Returns the bits of two numbers in one word."""
    high = lax.bitcast_convert_type(a, jnp.uint32).astype(jnp.uint64) << _BITS
    low = lax.bitcast_convert_type(b, jnp.uint32).astype(jnp.uint64)
    return high | low


def _unpacked(
    words: UInt64[Array, "*x"],
) -> tuple[Float32[Array, "*x"], Float32[Array, "*x"]]:
    a = lax.bitcast_convert_type((words >> _BITS).astype(jnp.uint32), jnp.float32)
    b = lax.bitcast_convert_type(words.astype(jnp.uint32), jnp.float32)
    return a, b
