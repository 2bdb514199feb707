"""Computes statistics and sums, as XLA:CPU computes them fast: by a tree, of few levels.

Each level is a loop to compile, and 1 us of a program. So what few sums are left are added in
another way than by one level more.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from eqx_norm.strategies._pair import rounded

from . import one_loop, reference, tree

# Up to so many values 8 at a time are as fast as 16, and round less.
_SMALL = 2**18
# XLA:CPU hands sums of so many float32 to its library, which needs no compiling, and up to so
# many sums them the same on any number of threads (jax 0.10.2 and 0.12.0.1).
_LIBRARY, _UNCUT = 2**12, 2**15
# Up to so many values are added one after the other in less time than a level takes. For one
# sum no more than so many are, as a tree rounds less.
_FEW, _IN_A_ROW = 2**14, 2**5
# So many vectors, of so many numbers in all, are summed by a single loop: faster by 1 us of 10,
# and by a third of the time to compile (jax 0.10.2).
_VECTORS = 2**12


def statistics(
    x: Float[Array, "*ensemble examples channels values"],
    mask: Bool[Array, "*#ensemble examples 1 values"] | None = None,
) -> tuple[Array, ...]:
    r"""Returns `reference.statistics`, those of float32 from one pass over x, in float64:

    $$d_i = x_i - k, \quad c = \tfrac{1}{n} \sum_i d_i, \quad \text{mean} = k + c, \quad
      \text{m2} = \sum_i d_i^2 - n c^2.$$

    What cancels in m2 is a factor of $1 + c^2 / \sigma^2$. As $k$ is one of the n values,
    $c^2 \le n \sigma^2$: up to $n = 10^8$ at least 8 of float64's 16 digits remain, whatever x
    is, and float32 has 7. A second pass, which reads all of x again, has nothing to correct.
    (Other dtypes take two: float64 has nothing wider, and converting half precision takes
    longer than reading it twice.)

    They are written to memory, or XLA:CPU would compute them again in every loop that reads
    them. In sums over rows, which the gradients of `LayerNorm`'s weight and bias are, they then
    are most of the loop, and LLVM does not vectorise it.
    """
    if x.dtype == jnp.float32:
        k = x[..., :1, :, :1] if mask is None else reference.first_counted(x, mask)
        with jax.enable_x64(True):
            count, *moments = (v.astype(x.dtype) for v in _in_one_pass(x, k, mask))
    else:
        count, *moments = reference.statistics(x, mask, total=total)
    return count, *one_loop.written(*moments)


def _in_one_pass(x: Array, k: Array, mask: Array | None) -> tuple[Array, ...]:
    x, k = x.astype(jnp.float64), k.astype(jnp.float64)
    axes = (x.ndim - 3, x.ndim - 1)
    if mask is None:
        n = np.asarray(x.shape[-3] * x.shape[-1], x.dtype)
    else:
        n = mask.sum(axes, keepdims=True, dtype=x.dtype)
    d = reference.counted(x - k, mask)
    sum_d, sum_d2 = total([d, d * d], axes, most=2 * tree.FAN, in_a_row=_FEW)
    c = rounded(sum_d / (n if mask is None else jnp.maximum(n, 1)))
    m2 = jnp.maximum(sum_d2 - sum_d * c, 0)
    mean = k + c
    # A conversion there and back may be left out by XLA.
    nearest = lax.reduce_precision(mean, exponent_bits=8, mantissa_bits=23)
    moments = n, nearest, m2, mean - nearest
    return tuple(jnp.broadcast_to(v, m2.shape)[..., 0, :, 0] for v in moments)


def total(
    arrays: Sequence[Array],
    axes: Sequence[int],
    *,
    most: int | None = None,
    in_a_row: int = _IN_A_ROW,
) -> tuple[Array, ...]:
    """Returns one sum each, as any `reference.Total`.

    At first `most` are added at a time. Of few values `in_a_row` are, which must not matter:
    those of statistics are float32 in sums of float64.
    """
    addends, values = _sizes(arrays, axes)
    are_vectors = arrays[0].shape[-1] == 1 and len(arrays) > 1
    if are_vectors and addends <= _IN_A_ROW and values <= _VECTORS:
        return tree.reduce(arrays, axes, keepdims=True)
    if most is None:
        most = tree.FAN if values > _SMALL else tree.FAN // 2
    rest = functools.partial(_rest, in_a_row=in_a_row)
    return tree.by_tree(arrays, axes, most=most, rest=rest)


def _rest(
    arrays: Sequence[Array], axes: Sequence[int], *, in_a_row: int
) -> tuple[Array, ...] | None:
    """Returns one sum each of few partial sums, and `None` of many."""
    addends, values = _sizes(arrays, axes)
    if arrays[0].dtype == jnp.float32 and _LIBRARY <= values <= _UNCUT:
        return reference.plain(arrays, axes)
    if addends <= in_a_row and values <= _FEW:
        return tree.reduce(arrays, axes, keepdims=True)
    return None


def _sizes(arrays: Sequence[Array], axes: Sequence[int]) -> tuple[int, int]:
    """Returns how many values are added for one sum, and for all."""
    shape = arrays[0].shape
    return math.prod(shape[axis] for axis in axes), math.prod(shape)
