"""Computes the formulas that every implementation of a pass over x keeps to.

Arrays have one number of axes; the last three of x are (examples, channels, values), and a
vector has size 1 along an axis where it does not differ. The mean is given as an unevaluated
pair, `mean + mean_rest`. x may be of a lower precision than the vectors, and is converted
first. A `mask`, if there is one, tells which places count: the others add nothing to a sum,
whatever they hold, and 0 is computed for them.

A *total* takes arrays of one shape and axes to sum over, and returns one sum each, those axes
kept with size 1. Every platform but the CPU gets `plain`, the CPU `by_tree`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from eqx_norm.strategies._pair import rounded

Activation = Callable[[Array], Array]
Total = Callable[[Sequence[Array], Sequence[int]], tuple[Array, ...]]
# What is unrolled and vectorised, and a cache line of float32.
_FAN = 16
# Up to so many values 8 at a time are as fast, and round less.
_SMALL = 2**18
# XLA:CPU hands sums of so many float32 to its library, which up to so many sums them the same
# on any number of threads (jax 0.10.2 and 0.12.0.1).
_LIBRARY, _UNCUT = 2**12, 2**15


def plain(arrays: Sequence[Array], axes: Sequence[int]) -> tuple[Array, ...]:
    """Returns one sum each, in XLA's own order: XLA for GPU and TPU fuses sums that read the
    same array into one pass."""
    return tuple(lax.expand_dims(lax.reduce_sum(a, tuple(axes)), tuple(axes)) for a in arrays)


def compute_dtype(dtype: Any) -> jnp.dtype:
    """Returns the dtype to calculate in: the input's own, but float32 at least."""
    return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def statistics(
    x: Float[Array, "*ensemble examples channels values"],
    mask: Bool[Array, "*#ensemble examples 1 values"] | None = None,
    *,
    total: Total = plain,
    sharded: bool = False,
) -> tuple[Array, Array, Array, Array]:
    r"""Returns count, mean, m2 and mean_rest of each channel, `(*ensemble, channels)`.

    With $k$ the first value of the channel that counts, every quantity in float32 at least,

    $$m = k + \tfrac{1}{n} \sum_i (x_i - k), \quad d_i = x_i - m, \quad
      c = \tfrac{1}{n} \sum_i d_i, \quad
      \text{m2} = \max\big(\sum_i d_i^2 - n c^2,\; 0\big),$$

    and the mean is $m + c$, returned as the nearest number and the rest. In exact arithmetic
    any $k$ gives the same. Without it the mean of a constant is not that constant, because
    XLA multiplies a sum by the rounded 1/n; with it, a constant channel has m2 = 0 to the bit
    (the failure of https://github.com/BVLC/caffe/issues/3963). $c$ is what rounding the mean
    has left out.

    Where XLA splits the examples over devices, `sharded`, the first value is found by a sum:
    to take it from an array, XLA would send the array to all devices.
    """
    dtype = compute_dtype(x.dtype)
    # Before anything is sliced: XLA:CPU slices bfloat16 by writing all of it as float32.
    x = x.astype(dtype)
    axes = (x.ndim - 3, x.ndim - 1)
    if mask is None:
        n = x.shape[-3] * x.shape[-1]
        count = jnp.full((*x.shape[:-3], x.shape[-2]), n, dtype)
        first = x[..., :1]
        k = _of_example(0, first) if sharded else first[..., :1, :, :]
    else:
        n = mask.sum(axes, keepdims=True, dtype=dtype)
        count = jnp.broadcast_to(n[..., 0, :, 0], (*x.shape[:-3], x.shape[-2]))
        n = jnp.maximum(n, 1)
        k = (_first_counted_by_sum if sharded else _first_counted)(x, mask)
    (sum_from_k,) = total([counted(x - k, mask)], axes)
    m = k + rounded(sum_from_k / n)
    d = counted(x - m, mask)
    sum_d, sum_d2 = total([d, d * d], axes)
    c = rounded(sum_d / n)
    mean = m + c
    mean_rest = c - (mean - m)
    m2 = jnp.maximum(sum_d2 - sum_d * c, 0)
    return count, mean[..., 0, :, 0], m2[..., 0, :, 0], mean_rest[..., 0, :, 0]


def sums(
    g: Array,
    x: Array,
    mean: Array,
    mean_rest: Array,
    mask: Array | None = None,
    *,
    shape: tuple[int, ...],
    total: Total = plain,
) -> tuple[Array, Array]:
    """Returns `sum(g)` and `sum(g * (x - mean))`, over the axes along which `shape` is 1."""
    axes = [
        i for i, (full, kept) in enumerate(zip(g.shape, shape, strict=True)) if full != kept
    ]
    g = counted(g, mask)
    sum_g, sum_gd = total([g, g * counted(centred(x, mean, mean_rest), mask)], axes)
    return sum_g, sum_gd


def affine(
    bias: Array,
    scale: Array,
    x: Array,
    mean: Array,
    mean_rest: Array,
    mask: Array | None = None,
) -> Array:
    """Returns `bias + scale * (x - mean)`, of the shape of `x`."""
    return counted(bias + scale * centred(x, mean, mean_rest), mask)


def activated(
    activation: Activation | None,
    bias: Array,
    scale: Array,
    x: Array,
    mean: Array,
    mean_rest: Array,
    mask: Array | None = None,
) -> Array:
    """Returns `activation(affine(...))`; 0 where the mask is false."""
    return counted(applied(activation, affine(bias, scale, x, mean, mean_rest)), mask)


def activation_jvp(
    g: Array,
    bias: Array,
    scale: Array,
    x: Array,
    mean: Array,
    mean_rest: Array,
    mask: Array | None = None,
    *,
    activation: Activation | None,
) -> Array:
    """Returns the activation's derivative at `affine(...)`, times `g`; 0 where the mask is
    false."""
    if activation is not None:
        u = affine(bias, scale, x, mean, mean_rest)
        _, g = jax.jvp(functools.partial(applied, activation), (u,), (g,))
    return counted(g, mask)


def applied(activation: Activation | None, u: Array) -> Array:
    """Returns `activation(u)` in the dtype of `u`, whatever its own is."""
    return u if activation is None else activation(u).astype(u.dtype)


@jax.custom_jvp
def rsqrt(x: Array) -> Array:
    r"""Returns $1 / \sqrt{x}$, with the derivatives of `derivatives.py`."""
    return lax.rsqrt(x)


def centred(x: Array, mean: Array, mean_rest: Array) -> Array:
    """Returns `x - mean`, in this order: exact where x is near a mean far from 0."""
    return (x.astype(mean.dtype) - mean) - mean_rest


def counted(values: Array, mask: Array | None = None) -> Array:
    """Returns the values that count, and 0 for the others."""
    return values if mask is None else jnp.where(mask, values, 0)


def _first_counted(x: Array, mask: Array) -> Array:
    """Returns the first value of each channel that counts, and 0 where none does."""
    example = jnp.argmax(mask.any(-1, keepdims=True), axis=-3, keepdims=True)
    x, mask = jnp.take_along_axis(x, example, -3), jnp.take_along_axis(mask, example, -3)
    place = jnp.argmax(mask, axis=-1, keepdims=True)
    return jnp.where(mask.any(-1, keepdims=True), jnp.take_along_axis(x, place, -1), 0)


def _first_counted_by_sum(x: Array, mask: Array) -> Array:
    """Returns `_first_counted`: of each example, and of these the first."""
    place = jnp.argmax(mask, axis=-1, keepdims=True)
    first, some = jnp.take_along_axis(x, place, -1), mask.any(-1, keepdims=True)
    number = jnp.where(some, _numbers(some), some.shape[-3]).min(-3, keepdims=True)
    return _of_example(number, first)


def _of_example(number: Array | int, values: Array) -> Array:
    """Returns the values of one example, as a sum over examples; 0 where there is none."""
    return jnp.where(_numbers(values) == number, values, 0).sum(-3, keepdims=True)


def _numbers(array: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, array.shape, array.ndim - 3)


# --- Sums, as XLA:CPU does them fast.


def by_tree(
    arrays: Sequence[Array], axes: Sequence[int], *, small: bool | None = None
) -> tuple[Array, ...]:
    """Returns one sum each, in one pass, 16 at a time; at first 8, if `small`.

    XLA:CPU (jax 0.10.2 and 0.12.0.1) does not fuse sums. Measured there, on two cores:

    - A sum of float32 alone is handed to a library, which vectorises but takes in what computes
      its input only where nobody else uses it, and no comparison, selection or bfloat16 at all:
      those are written to memory first. The gradient through a ReLU is all of these.
    - One reduction of several arrays (`lax.reduce` of a tuple) is a loop of XLA's own, which
      takes in everything and reads everything once; but along a row it adds one number after
      the other, 3 to 4 cycles each.
    - The same loop over an axis of at most 16 with a contiguous axis behind it is unrolled, and
      vectorised along that axis. From 24 on it is not, and 2 to 6 times slower. With 16
      numbers, a cache line of float32, behind it, blocks of 16 by 16 are read in order; with 64
      and more the 16 rows are as many streams, and half the speed is lost.

    So 16 MiB of float32 take 0.6 ms where the row by row loop takes 2.4 and the library, with
    what it needs written out, 3.3 (bfloat16: 0.4, 2.4 and 12). A single array is summed as its
    two halves, to be a reduction of several, too. A tree of sums also rounds less than a row.

    Each level is a loop to compile. So what few sums are left go to the library, which needs no
    compiling, once they are few enough that it does not cut them up by the number of threads.
    """
    if len(arrays) == 1:
        return (_by_halves(arrays[0], axes),)
    first = True
    while math.prod(arrays[0].shape[axis] for axis in axes) > _FAN:
        shape = arrays[0].shape
        values = math.prod(shape)
        if not first and _LIBRARY <= values <= _UNCUT and arrays[0].dtype == jnp.float32:
            return plain(arrays, axes)
        is_small = values <= _SMALL if small is None else small
        most = _FAN // 2 if first and is_small else _FAN
        axis, fan = _next(shape, axes, most, first=first)
        if fan == 1:
            return _in_parts(arrays, axes, axis, most, small)
        arrays = _sum_blocks(arrays, axis, fan, in_pairs=not first)
        first = False
    return _reduce(arrays, axes, keepdims=True)


def _next(
    shape: Sequence[int], axes: Sequence[int], most: int, *, first: bool
) -> tuple[int, int]:
    """Returns the axis to sum along next, and how many at a time."""
    examples, values = axes[0], axes[-1]
    fans = {axis: _fan(shape[axis], most) for axis in axes}
    lines, rest = divmod(shape[values], _FAN)
    in_lines = values == len(shape) - 1 and rest == 0 and 2 * _fan(lines, most) >= most
    if in_lines:
        fans[values] = _fan(lines, most)  # fewer at a time, but side by side in whole lines
    if first and in_lines:
        axis = values
    elif first and 2 * fans[examples] >= most:
        axis = examples
    elif first and shape[values] >= _FAN:
        axis = values
    else:
        axis = max(axes, key=shape.__getitem__)
    return axis, fans[axis]


def _by_halves(array: Array, axes: Sequence[int]) -> Array:
    """Sums the halves as two arrays: those of another axis than the one that is summed first,
    or half as many numbers at a time."""
    even = [axis for axis in axes if array.shape[axis] % 2 == 0]
    if not even:
        return plain([array], axes)[0]
    first, _ = _next(array.shape, axes, _FAN, first=True)
    axis = min(even, key=lambda axis: axis == first)
    front, back = by_tree(_halves(array, axis), axes, small=axis == first or None)
    return lax.add(front, back)


def _in_parts(
    arrays: Sequence[Array], axes: Sequence[int], axis: int, fan: int, small: bool | None
) -> tuple[Array, ...]:
    """Sums what `fan` divides and the remainder, where the size has no divisor to use."""
    size = arrays[0].shape[axis]
    whole = size - size % fan
    front = [lax.slice_in_dim(a, 0, whole, axis=axis) for a in arrays]
    back = [lax.slice_in_dim(a, whole, size, axis=axis) for a in arrays]
    front, back = (by_tree(part, axes, small=small) for part in (front, back))
    return tuple(map(lax.add, front, back))


def _sum_blocks(arrays: Sequence[Array], axis: int, fan: int, *, in_pairs: bool) -> list[Array]:
    """Returns the sums of blocks of `fan` along `axis`, which gets shorter by that factor."""
    shape = arrays[0].shape
    before, after, length = shape[:axis], shape[axis + 1 :], shape[axis] // fan
    line = 1 if after else _fan(length)
    blocks = [array.reshape(*before, length // line, fan, line, *after) for array in arrays]
    if in_pairs:
        blocks = [_add_pairs(block, axis + 1) for block in blocks]
    return [s.reshape(*before, length, *after) for s in _reduce(blocks, [axis + 1])]


def _add_pairs(block: Array, axis: int) -> Array:
    """Adds the block's halves, so that a single large value takes part in fewer additions,
    each of which rounds.

    Where the sums read what the user gave, it is not worth it: one operation more would keep
    the loop from being unrolled.
    """
    if block.shape[axis] % 2 == 0:
        return lax.add(*_halves(block, axis))
    return block


def _halves(array: Array, axis: int) -> tuple[Array, Array]:
    size = array.shape[axis]
    front = lax.slice_in_dim(array, 0, size // 2, axis=axis)
    return front, lax.slice_in_dim(array, size // 2, size, axis=axis)


def _fan(size: int, most: int = _FAN) -> int:
    """Returns the largest divisor of `size` up to `most`; 1 rather than less than 4."""
    fan = max(fan for fan in range(1, most + 1) if size % fan == 0)
    return fan if fan >= min(4, size) else 1


def _reduce(
    arrays: Sequence[Array], axes: Sequence[int], *, keepdims: bool = False
) -> tuple[Array, ...]:
    zeros = tuple(np.zeros((), array.dtype) for array in arrays)
    sums = lax.reduce(tuple(arrays), zeros, lambda a, b: tuple(map(lax.add, a, b)), tuple(axes))
    return tuple(lax.expand_dims(s, tuple(axes)) for s in sums) if keepdims else tuple(sums)
