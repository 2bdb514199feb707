"""Chooses the part of x whose mean the statistics subtract, on a GPU and a TPU."""

import math

from jax import lax
from jaxtyping import Array, Float

from eqx_norm._normalise.formulas import reference
from eqx_norm._normalise.formulas.reference import Shape

_PARTS = 16  # XLA reads a sixteenth of x twice, and cancellation costs 4 of 24 bits at most
_LINE = 32  # float32 in a cache line of a GPU


def part_of(x: Float[Array, "*x"], shape: Shape, devices: int = 1) -> Float[Array, "*part"]:
    """Returns a sixteenth of x for `reference.statistics` of `shape`, along one of the axes of
    which all values are summed: the first of at least 16 values, else the longest. Returns x
    itself if there is no such axis, as in groups of vectors. If `devices` split the axis
    evenly, the sixteenth has values of each, so that none are sent; values of rows are."""
    sizes = dict(enumerate(x.shape))
    axes = [i for i in reference.summed_axes(x.shape, shape) if shape[i] == 1]
    axes = [i for i in axes if isinstance(sizes[i], int) and sizes[i] % devices == 0]
    if not axes:
        return x
    axis = max(axes, key=lambda axis: min(sizes[axis], _PARTS))
    n = sizes[axis]
    if axis == x.ndim - 1:  # not by device, for XLA:TPU would copy x
        size = -(-n // (_PARTS * _LINE)) * _LINE
        return lax.slice_in_dim(x, 0, min(size, n), axis=axis)
    if devices == 1 or axis == x.ndim - 2:
        # A TPU would read all of these columns for every sixteenth value.
        return first_on_each(devices, x, axis, -(-n // (_PARTS * devices)))
    # On a mesh of two axes XLA:TPU would copy images to cut them by device.
    return lax.slice_in_dim(x, 0, n, math.gcd(_PARTS, n // devices), axis)


def first_on_each(
    devices: int, x: Float[Array, "*x"], axis: int, size: int = 1
) -> Float[Array, "*part"]:
    """Returns the first `size` values of each of as many parts of an axis as there are devices;
    x itself if the axis has no such parts."""
    n, before, after = x.shape[axis], x.shape[:axis], x.shape[axis + 1 :]
    if not isinstance(n, int) or n % devices:
        return x
    if devices == 1:
        return lax.slice_in_dim(x, 0, size, axis=axis)
    on_each = x.reshape(*before, devices, n // devices, *after)
    first = lax.slice_in_dim(on_each, 0, size, axis=axis + 1)
    return first.reshape(*before, devices * size, *after)
