"""Defines an example with its mask, and which of its values share moments or a weight."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Shaped

from eqx_norm._jax import collectives
from eqx_norm._jax.collectives import AxisName

from .reference import Shape, Size, upcast


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
    - `channels`: the number of per-channel weights: the size of the first axis of x, or 1.
    - `axes`: by default the first axis, as of the channels of an image.
    """

    shape: Shape
    groups: int | None
    channels: int
    axes: tuple[int, ...] = (0,)

    @property
    def ndim(self) -> int:
        """Returns the number of an example's axes."""
        return len(self.shape)

    @property
    def moments_shape(self) -> Shape:
        """Returns the shape of moments, with as many axes as x."""
        if self.groups is None:
            return tuple(1 if i in self.axes else n for i, n in enumerate(self.shape))
        return (self.groups, *self._ones)[: self.ndim]

    def own_shape(self, x: Shape) -> Shape:
        """Returns the shape of the moments of each example of x, `(*mapped, *example)`."""
        return (*x[: len(x) - self.ndim], *self.moments_shape)

    @property
    def kept(self) -> Shape:
        """Returns the shape of moments along `axes` without those, `(1,)` if none is left."""
        return tuple(n for i, n in enumerate(self.shape) if i not in self.axes) or (1,)

    @property
    def weights_shape(self) -> Shape:
        """Returns the shape of a weight or bias of each channel, with as many axes as x."""
        return (-1, *self._ones)[: self.ndim]

    @property
    def _ones(self) -> Shape:
        return (1,) * (self.ndim - 1)

    @property
    def moments_size(self) -> int:
        """Returns how many means there are: of groups, or of positions."""
        return math.prod(self.moments_shape)

    @property
    def length(self) -> Size:
        """Returns the number of values in a group."""
        return math.prod(self.shape) // self.moments_size

    def of_shard(self, x: Shape, shard: Shape) -> "Layout":
        """Returns the layout of a device's shard of x, which cuts no group."""
        first = len(x) - self.ndim
        groups, channels = self.groups, self.channels
        if groups is not None and groups > 1:
            groups = groups * shard[first] // x[first]
        if channels > 1:
            channels = channels * shard[first] // x[first]
        return Layout(shard[first:], groups, channels, self.axes)

    # --- The shapes in which passes compute.

    @property
    def inner(self) -> int:
        """Returns the length of the last run of summed axes, if x ends with it; else the number
        of axes from the last summed axis on. All axes before may be treated as mapped axes. If
        x has groups, returns the number of all axes of an example."""
        if self.groups is not None:
            return self.ndim
        if self.ndim == 0:
            return 0
        is_summed = [axis in self.axes for axis in range(self.ndim)]
        last_run = [*itertools.takewhile(lambda s: s == is_summed[-1], reversed(is_summed))]
        if is_summed[-1]:
            return len(last_run)
        return min(len(last_run) + 1, self.ndim)

    def cut(self, shape: Shape) -> Shape:
        """Returns the shape of an array with the first axis of an example cut into groups, if
        there are several groups of several channels; else `shape` itself. In another shape
        XLA:TPU would copy the array; XLA:GPU would not fuse it into sums."""
        if self.ndim == 0 or self.groups in (None, 1, self.shape[0]):
            return shape
        axis = len(shape) - self.ndim
        number = 1 if shape[axis] == 1 else self.groups
        return (*shape[:axis], number, shape[axis] // number, *shape[axis + 1 :])

    def rows(self, shape: Shape, *, by_channel: bool = False) -> Shape:
        """Returns the shape with runs of adjacent axes merged: axes that are summed for moments
        ("values"), and axes that are not ("groups"). With groups it is `(*mapped, groups,
        values)`; along `axes` the runs stay in the order of x. If `by_channel`, the channels of
        a group are an axis between the two. XLA:CPU loops over an array's axes, and rows of 7
        or 8 values are too short for a vector unit."""
        mapped, sizes = self._sizes(shape)
        return (*mapped, *self._merged(sizes, by_channel))

    def in_rows(
        self, array: Shaped[Array, "..."], *, by_channel: bool = False
    ) -> Shaped[Array, "..."]:
        """Returns an array that broadcasts to x in the shape `rows`, repeated where it has size
        1 along some of the merged axes, as a mask of positions has along a group's channels."""
        mapped, sizes = self._sizes(array.shape)
        repeated = self._repeated(sizes, by_channel)
        if repeated != sizes:
            array = jnp.broadcast_to(array.reshape(*mapped, *sizes), (*mapped, *repeated))
        return array.reshape(*mapped, *self._merged(repeated, by_channel))

    def weights(self, array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Returns a weight that broadcasts to x, repeated where `in_rows` would repeat it: its
        gradient is then one of the sums of a pass."""
        mapped, sizes = self._sizes(array.shape)
        repeated = self._repeated(sizes, by_channel=True)
        if repeated == sizes:
            return array
        # Without groups: the weights of groups are of channels or of values.
        return jnp.broadcast_to(array, (*mapped, *repeated))

    def spread(self, vector: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
        """Returns a vector of the shape of moments, repeated for each channel of a group."""
        axis = vector.ndim - self.ndim
        if self.groups is None or self.ndim == 0 or vector.shape[axis] in (1, self.shape[0]):
            return vector
        return jnp.repeat(vector, self.shape[0] // vector.shape[axis], axis)

    def _sizes(self, shape: Shape) -> tuple[Shape, list[Size]]:
        """Returns the sizes of an array's mapped axes, and of those of an example, of which the
        first is cut into groups."""
        axis = len(shape) - self.ndim
        mapped, example = shape[:axis], list(shape[axis:])
        if self.groups is None or self.ndim == 0:
            return mapped, example or [1]
        number = 1 if example[0] == 1 else self.groups
        return mapped, [number, example[0] // number, *example[1:]]

    def _runs(self, by_channel: bool) -> list[list[int]]:
        """Returns, for each merged axis, the axes of `_sizes` that form it."""
        if self.ndim == 0:
            kinds = ["values"]
        elif self.groups is None:
            kinds = ["values" if axis in self.axes else "groups" for axis in range(self.ndim)]
        else:
            has_channels = by_channel and self.channels > self.groups
            spatial = ["values" for _ in self.shape[1:]]
            kinds = ["groups", "channels" if has_channels else "values", *spatial]
        runs = itertools.groupby(range(len(kinds)), kinds.__getitem__)
        return [[*run] for _, run in runs]

    def _repeated(self, sizes: list[Size], by_channel: bool) -> list[Size]:
        _, full = self._sizes(self.shape)
        repeated = list(sizes)
        for run in self._runs(by_channel):
            if any(sizes[axis] != 1 for axis in run):
                for axis in run:
                    repeated[axis] = full[axis]
        return repeated

    def _merged(self, sizes: Sequence[Size], by_channel: bool) -> Shape:
        merged = [math.prod(sizes[axis] for axis in run) for run in self._runs(by_channel)]
        return tuple(merged) if len(merged) > 1 else (1, *merged)


class Example(NamedTuple):
    """Holds one example, the input of `moments` and `normalise`.

    **Fields:**

    - `x`: the example, float or complex, and the only residual of this size.
    - `x_upcast`: x in float32 or better. The derivatives of the moments and of y both go
        through it, so that their sum is rounded once: see `moments_primitives`.
    - `mask`: `None`, or bools with as many axes as x; values where it is false do not count.
    - `layout`: which values share moments, and which share a weight.
    """

    x: Inexact[Array, "*example"]
    x_upcast: Inexact[Array, "*example"]
    mask: Bool[Array, "*#example"] | None
    layout: Layout

    @staticmethod
    def of(
        x: Inexact[Array, "*example"],
        mask: Bool[Array, "..."] | None = None,
        *,
        groups: int | None,
        channels: int,
    ) -> "Example":
        """Returns the example x; `mask` broadcasts to `x.shape[1:]` or has the shape of x."""
        if mask is not None and mask.shape != x.shape:
            mask = jnp.broadcast_to(mask, x.shape[1:])[None]
        return Example(x, upcast(x), mask, Layout(x.shape, groups, channels))

    @staticmethod
    def along(
        x: Inexact[Array, "*example"],
        axes: tuple[int, ...],
        mask: Bool[Array, "*#example"] | None = None,
    ) -> "Example":
        """Returns the example x with moments along these axes; `mask` has as many axes."""
        return Example(x, upcast(x), mask, Layout(x.shape, None, 1, axes))


def full_count(example: Example, axis_name: AxisName) -> Size:
    """Returns the number of values in each group, over all examples along the named axes: an
    int, or a symbol of `jax.export`. Raises `NameError` if `axis_name` is not bound."""
    return example.x.size // example.layout.moments_size * collectives.size(axis_name)
