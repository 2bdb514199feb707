"""Sums over many values: as XLA does it, and as XLA:CPU does it fast.

A *total* takes arrays of one shape and axes to sum over, and returns one sum each, those axes
kept with size 1. Every platform but the CPU gets `plain`: XLA for GPU and TPU fuses sums that
read the same array into one pass.

XLA:CPU (jax 0.10.2 and 0.12.0.1) does not. Measured there, on two cores:

- A sum of float32 alone is handed to a library, which vectorises but takes in what computes its
  input only where nobody else uses it, and no comparison, selection or bfloat16 at all: those
  are written to memory first. The gradient through a ReLU is all of these.
- One reduction of several arrays (`lax.reduce` of a tuple) is a loop of XLA's own, which takes
  in everything and reads everything once; but along a row it adds one number after the other,
  3 to 4 cycles each, and is limited by that, not by memory.
- The same loop over an axis of at most 16 with a contiguous axis behind it is unrolled, and
  vectorised along that axis. From 24 on it is not unrolled any more, and 2 to 6 times
  slower. With 16 numbers, a cache line of float32, behind it, blocks of 16 by 16 are read in
  order; with 64 and more the 16 rows are as many streams, and half the speed is lost.

So `by_tree` sums 16 by 16, again and again, and reads each input once: 16 MiB of float32 take
0.6 ms where the row by row loop takes 2.4 and the library, with what it needs written out, 3.3
(bfloat16: 0.4, 2.4 and 12). A single array is summed as its two halves, so that it is a
reduction of several, too. A tree of sums also rounds less than a row.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jax import lax
from jaxtyping import Array

# What is unrolled and vectorised, and a cache line of float32.
_FAN = 16
# Up to so many values 8 at a time are as fast, and round less.
_SMALL = 2**18

Total = Callable[[Sequence[Array], Sequence[int]], tuple[Array, ...]]


def plain(arrays: Sequence[Array], axes: Sequence[int]) -> tuple[Array, ...]:
    """Returns one sum each, in XLA's own order."""
    return tuple(lax.expand_dims(lax.reduce_sum(a, tuple(axes)), tuple(axes)) for a in arrays)


def by_tree(
    arrays: Sequence[Array], axes: Sequence[int], *, small: bool | None = None
) -> tuple[Array, ...]:
    """Returns one sum each, in one pass, 16 at a time; at first 8, if `small`."""
    if len(arrays) == 1:
        return (_by_halves(arrays[0], axes),)
    first = True
    while math.prod(arrays[0].shape[axis] for axis in axes) > _FAN:
        # The last axis first: what is summed there lies together. Then the longest.
        shape = arrays[0].shape
        axis = (
            axes[-1] if first and shape[axes[-1]] >= _FAN else max(axes, key=shape.__getitem__)
        )
        is_small = math.prod(shape) <= _SMALL if small is None else small
        most = _FAN // 2 if first and is_small else _FAN
        fan = _fan(shape[axis], most)
        if fan == 1:
            return _in_parts(arrays, axes, axis, most, small)
        arrays = _sum_blocks(arrays, axis, fan, in_pairs=not first)
        first = False
    return _reduce(arrays, axes, keepdims=True)


def _by_halves(array: Array, axes: Sequence[int]) -> Array:
    even = [axis for axis in axes if array.shape[axis] % 2 == 0]
    if not even:
        return plain([array], axes)[0]
    front, back = by_tree(_halves(array, even[0]), axes)
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
