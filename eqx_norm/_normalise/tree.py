"""Sums in a tree, of 16 at a time, as XLA:CPU computes sums fast.

XLA:CPU (jax 0.10.2 and 0.12.0.1) does not fuse sums. Measured there, on two cores:

- A sum of float32 alone is handed to a library, which vectorises but takes in what computes
  its input only where nobody else uses it, and no comparison, selection or bfloat16 at all:
  those are written to memory first. The gradient through a ReLU is all of these.
- One reduction of several arrays (`lax.reduce` of a tuple) is a loop of XLA's own, which
  takes in everything and reads everything once; but along a row it adds one number after
  the other, 3 to 4 cycles each.
- The same loop over an axis of at most 16 with a contiguous axis behind it is unrolled, and
  vectorised along that axis. From 24 on it is not, and 2 to 6 times slower; 32 are unrolled
  in the statistics, which read x alone. With 16 numbers, a cache line of float32, behind it,
  blocks of 16 by 16 are read in order; with 64 and more the 16 rows are as many streams, and
  half the speed is lost. But rows that are no whole number of lines, as the 49 and 196 values
  of late feature maps, vectorise badly: there the same places of 16 examples are added, 1.3 to
  2 times as fast.

So 16 MiB of float32 take 0.6 ms where the row by row loop takes 2.4 and the library, with what
it needs written out, 3.3 (bfloat16: 0.4, 2.4 and 12). A tree of sums also rounds less than a
row.
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from jax import lax
from jaxtyping import Array

from . import reference

# What is unrolled and vectorised, and a cache line of float32.
FAN = 16
# Returns one sum each of partial sums, or `None` if they are too many.
Rest = Callable[[Sequence[Array], Sequence[int]], tuple[Array, ...] | None]


def by_tree(
    arrays: Sequence[Array], axes: Sequence[int], *, most: int = FAN, rest: Rest | None = None
) -> tuple[Array, ...]:
    """Returns one sum each, as any `reference.Total`, in one pass: in a tree, of 16 at a time.

    The order depends on nothing but the sizes of `axes`, `most` and `rest`.

    **Arguments:**

    - `most`: how many at a time at first: 8, 16 or, where whole lines are summed, 32.
    - `rest`: sums what is left after a level, if it can; or else there is one more.
    """
    if len(arrays) == 1:
        return (_by_halves(arrays[0], axes, most, rest),)
    first = True
    while math.prod(arrays[0].shape[axis] for axis in axes) > FAN:
        sums = None if first or rest is None else rest(arrays, axes)
        if sums is not None:
            return sums
        at_most = most if first else FAN
        axis, fan = _next(arrays[0].shape, axes, at_most, first=first)
        if fan == 1:
            total = functools.partial(by_tree, axes=axes, most=most, rest=rest)
            parts = _parts(arrays, axis, min(at_most, FAN))
            return tuple(map(lax.add, *map(total, parts)))
        arrays = _sum_blocks(arrays, axis, fan, in_pairs=not first)
        first = False
    return reduce(arrays, axes, keepdims=True)


def _next(
    shape: Sequence[int], axes: Sequence[int], most: int, *, first: bool
) -> tuple[int, int]:
    """Returns the axis to sum along next, and how many at a time."""
    examples, values = axes[0], axes[-1]
    at_most = min(most, FAN)
    fans = {axis: _fan(shape[axis], at_most) for axis in axes}
    lines, rest = divmod(shape[values], FAN)
    in_lines = values == len(shape) - 1 and rest == 0 and 2 * _fan(lines, most) >= at_most
    if in_lines:
        fans[values] = _fan(lines, most)  # fewer at a time, but side by side in whole lines
    if first and in_lines:
        axis = values
    elif first and 2 * fans[examples] >= at_most:
        axis = examples
    elif first and shape[values] >= FAN:
        axis = values
    else:
        axis = max(axes, key=shape.__getitem__)
    return axis, fans[axis]


def _by_halves(array: Array, axes: Sequence[int], most: int, rest: Rest | None) -> Array:
    """Sums a single array as its two halves, to be a reduction of several, too.

    They are those of another axis than the one that is summed first; or else half as many
    numbers are summed at a time, as each is read from two places.
    """
    even = [axis for axis in axes if array.shape[axis] % 2 == 0]
    if not even:
        return reference.plain([array], axes)[0]
    first, _ = _next(array.shape, axes, FAN, first=True)
    axis = min(even, key=lambda axis: axis == first)
    most = min(most, FAN // 2) if axis == first else most
    return lax.add(*by_tree(_halves(array, axis), axes, most=most, rest=rest))


def _parts(arrays: Sequence[Array], axis: int, fan: int) -> tuple[list[Array], list[Array]]:
    """Returns what `fan` divides and the remainder, where the size has no divisor to use."""
    size = arrays[0].shape[axis]
    whole = size - size % fan
    front = [lax.slice_in_dim(a, 0, whole, axis=axis) for a in arrays]
    return front, [lax.slice_in_dim(a, whole, size, axis=axis) for a in arrays]


def _sum_blocks(arrays: Sequence[Array], axis: int, fan: int, *, in_pairs: bool) -> list[Array]:
    """Returns the sums of blocks of `fan` along `axis`, which gets shorter by that factor."""
    shape = arrays[0].shape
    before, after, length = shape[:axis], shape[axis + 1 :], shape[axis] // fan
    line = 1 if after else _fan(length)
    blocks = [array.reshape(*before, length // line, fan, line, *after) for array in arrays]
    if in_pairs:
        blocks = [_add_pairs(block, axis + 1) for block in blocks]
    return [s.reshape(*before, length, *after) for s in reduce(blocks, [axis + 1])]


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


def _fan(size: int, most: int = FAN) -> int:
    """Returns the largest divisor of `size` up to `most`; 1 rather than less than 4."""
    fan = max(fan for fan in range(1, most + 1) if size % fan == 0)
    return fan if fan >= min(4, size) else 1


def reduce(
    arrays: Sequence[Array], axes: Sequence[int], *, keepdims: bool = False
) -> tuple[Array, ...]:
    """Returns one sum each, all in one loop."""
    zeros = tuple(np.zeros((), array.dtype) for array in arrays)
    sums = lax.reduce(tuple(arrays), zeros, lambda a, b: tuple(map(lax.add, a, b)), tuple(axes))
    return tuple(lax.expand_dims(s, tuple(axes)) for s in sums) if keepdims else tuple(sums)
