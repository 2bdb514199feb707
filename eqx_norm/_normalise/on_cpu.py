"""Computes statistics and sums, as XLA:CPU computes them fast."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from eqx_norm.strategies._pair import rounded

from . import one_loop, reference, tree

# So many float64 are added one after the other in less time than a level takes to compile.
_FEW = 2**14
# Of so many vectors, of so many numbers in all, a single loop is faster by 1 us of 10, and by a
# third of the time to compile (jax 0.10.2). More would round more than a tree does.
_VECTORS, _NUMBERS = 2**5, 2**12


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
    sum_d, sum_d2 = total([d, d * d], axes, most=2 * tree.FAN, few=_FEW)
    c = rounded(sum_d / (n if mask is None else jnp.maximum(n, 1)))
    m2 = jnp.maximum(sum_d2 - sum_d * c, 0)
    mean = k + c
    # A conversion there and back may be left out by XLA.
    nearest = lax.reduce_precision(mean, exponent_bits=8, mantissa_bits=23)
    moments = n, nearest, m2, mean - nearest
    return tuple(jnp.broadcast_to(v, m2.shape)[..., 0, :, 0] for v in moments)


def total(arrays: Sequence[Array], axes: Sequence[int], **kwargs: int) -> tuple[Array, ...]:
    """Returns one sum each, as any `reference.Total`: `tree.by_tree(..., **kwargs)`, but those
    over a few vectors in one loop."""
    shape = arrays[0].shape
    few = math.prod(shape[axis] for axis in axes) <= _VECTORS and shape[-1] == 1
    if few and math.prod(shape) <= _NUMBERS and len(arrays) > 1:
        return tree.reduce(arrays, axes, keepdims=True)
    return tree.by_tree(arrays, axes, **kwargs)
