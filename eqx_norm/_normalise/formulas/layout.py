"""Defines which values of an example share moments, and which share a weight."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_norm.strategies import Moments

from .reference import Shape


class Blocks(NamedTuple):
    """Cuts the values of an example of `ndim` axes into a `number` of consecutive blocks. A
    vector has one value per block."""

    ndim: int
    number: int

    def flat(self, shape: Shape) -> Shape:
        """Returns the shape `(*mapped, blocks, values)`. XLA:CPU loops over an array's axes,
        and rows of 7 or 8 values are too short for a vector unit."""
        mapped = len(shape) - self.ndim
        size, *others = shape[mapped:] or (1,)
        number = 1 if size == 1 else self.number
        # One block may have a first axis of any size.
        size = size if number == 1 else size // number
        return (*shape[:mapped], number, math.prod((size, *others)))

    def cut(self, shape: Shape, x: Shape) -> Shape:
        """Returns the shape of an operand with the first axis of an example cut into blocks, if
        a block of x, of shape `x`, spans several indices of that axis; else `shape` itself.
        In another shape XLA:TPU would copy the array; XLA:GPU would not fuse it into sums."""
        axis = len(shape) - self.ndim
        if self.ndim == 0 or self.number in (1, x[axis]):
            return shape
        number = 1 if shape[axis] == 1 else self.number
        return (*shape[:axis], number, shape[axis] // number, *shape[axis + 1 :])

    def share(self, x: Shape, share: Shape) -> "Blocks":
        """Returns the blocks of a device's share of x, which cuts no block."""
        axis = len(x) - self.ndim
        number = self.number * share[axis] // x[axis] if self.number > 1 else self.number
        return self._replace(number=number)

    def arranged(
        self, arrays: Sequence[Array], shape: Shape, *, flat: bool
    ) -> tuple[list[Array], Shape]:
        """Returns the arrays and the shape of vectors, reshaped for the computation by `flat`
        or `cut`. The first array is as large as x."""
        x = arrays[0].shape
        form = self.flat if flat else functools.partial(self.cut, x=x)
        formed, length = [a.reshape(form(a.shape)) for a in arrays], form(x)[-1:]
        if flat:
            # A mask of positions is repeated for each channel of a group: a group is one row.
            formed = [
                a if a.shape[-1] in (1, *length) else jnp.tile(a, length[0] // a.shape[-1])
                for a in formed
            ]
        return formed, form(shape)

    def flat_outside(self, shape: Shape) -> Shape:
        """Returns `flat(shape)`, for computations outside of a pass. On a mesh with explicit
        axes, which a reshape cannot merge, returns `shape` itself."""
        typed = jax.sharding.get_abstract_mesh().explicit_axes
        return shape if typed else self.flat(shape)

    def spread(self, vector: Array, shape: Shape) -> Array:
        """Returns the vector, repeated to broadcast to `shape` if each of its values is for
        several indices of an example's first axis, as for groups of channels."""
        axis = len(shape) - self.ndim
        if self.ndim == 0 or vector.shape[axis] in (1, shape[axis]):
            return vector
        return jnp.repeat(vector, shape[axis] // vector.shape[axis], axis)


class Layout(NamedTuple):
    """Says which values of an example of this shape share moments, and which share a weight.

    | layer | groups | channels |
    | --- | --- | --- |
    | batch norm, instance norm | channels of x | channels of x |
    | layer norm, RMS norm | 1 | 1 |
    | group norm | groups | channels of x |
    | layer norm, RMS norm along the first axis; `eqx_norm.moments` | `None` | 1 |

    **Fields:**

    - `groups`: the number of moments; x is cut into this number of equal, consecutive blocks.
        If `None`, each position along the other axes has its own moments, taken along `axes`.
    - `channels`: the number of weights and biases: the size of the first axis of x, or 1.
    - `axes`: by default the first axis, as of the channels of an image.
    """

    shape: Shape
    groups: int | None
    channels: int
    axes: tuple[int, ...] = (0,)

    def share(self, x: Shape, share: Shape) -> "Layout":
        """Returns the layout of a device's share of x, which cuts no group."""
        n, (groups, channels) = len(x) - self.ndim, (self.groups, self.channels)
        groups = groups * share[n] // x[n] if groups and groups > 1 else groups
        channels = channels * share[n] // x[n] if channels > 1 else channels
        return Layout(share[n:], groups, channels, self.axes)

    @property
    def ndim(self) -> int:
        """Returns the number of an example's axes."""
        return len(self.shape)

    @property
    def moments_shape(self) -> Shape:
        """Returns the shape of moments, with as many axes as x."""
        if self.groups is None:
            return tuple(1 if i in self.axes else n for i, n in enumerate(self.shape))
        return (self.groups, *self._ones)[: len(self.shape)]

    @property
    def kept(self) -> Shape:
        """Returns the shape of moments along `axes` without those, `(1,)` if none is left."""
        return tuple(n for i, n in enumerate(self.shape) if i not in self.axes) or (1,)

    @property
    def weights_shape(self) -> Shape:
        """Returns the shape of a weight or bias of each channel, with as many axes as x."""
        return (-1, *self._ones)[: len(self.shape)]

    @property
    def size(self) -> int:
        """Returns the number of groups."""
        return math.prod(self.moments_shape)

    @property
    def length(self) -> Any:
        """Returns the number of values in a group."""
        return math.prod(self.shape) // self.size

    def rows(self, shape: Shape) -> Shape:
        """Returns the shape `(*mapped, groups, values of a group)` of x, weights or moments,
        with size 1 where they are broadcast."""
        size = math.prod(shape[len(shape) - self.ndim :])
        number = 1 if size == 1 else self.size
        return (*shape[: len(shape) - self.ndim], number, size // number)

    @property
    def moment_blocks(self) -> Blocks:
        """Returns the blocks of a pass whose vectors have one number for each group; without
        groups, for each position; the last axes are merged if all are summed, or all kept."""
        if self.groups is not None:
            return Blocks(len(self.shape), self.groups)
        is_summed = [axis in self.axes for axis in range(len(self.shape))]
        start = len(is_summed)
        while start > 0 and is_summed[start - 1] == is_summed[-1]:
            start -= 1
        if is_summed[-1:] == [True]:
            return Blocks(len(self.shape) - start, 1)
        start = max(start - 1, 0)  # of the last summed axis
        return Blocks(len(self.shape) - start, self.shape[start] if self.shape else 1)

    @property
    def weight_blocks(self) -> Blocks:
        """Returns the blocks of a pass whose vectors have one number for each channel;
        without groups, for each position."""
        return Blocks(len(self.shape), self.channels) if self.groups else self.moment_blocks

    @property
    def _ones(self) -> Shape:
        return (1,) * (len(self.shape) - 1)

    def columns(self, used: Moments, rstd: Array) -> list[Array]:
        """Returns mean, mean_rest and rstd per channel or position, with as many axes as x."""
        vectors = [*used.mean_pair.words(rstd.dtype), rstd]
        if self.groups is None:
            return [v.reshape(self.moments_shape) for v in vectors]
        if (times := self.channels // self.groups) > 1:
            vectors = [jnp.repeat(v, times) for v in vectors]
        return [v.reshape(self.weights_shape) for v in vectors]
