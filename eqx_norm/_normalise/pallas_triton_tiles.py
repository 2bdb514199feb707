"""Where a program finds its values: in columns, and in rows.

Say x of 8 examples, 64 channels and 1 value. In columns it is (1, 8, 64); a tile might be
4 x 32 of it, and is reduced along its first axis. LayerNorm's x of 1 channel and 768 values,
mapped over 512 examples, is (512, 768) in rows; a tile might be 4 x 256, and is reduced along
its second axis. Both have vectors of (ensemble, channels), and give partial results of
(ensemble, partials, channels), to be merged.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .tiling import Tiling

# An index of a reference: scalars and arrays that broadcast.
Index = tuple[Any, ...]


class Here(NamedTuple):
    """What one program works on, as indices that broadcast to a tile."""

    start: Array  # of its slice, along what is reduced
    lane: Array
    own: Array  # channels or rows that are not reduced
    exists: Array | None  # which of these there are; None: all
    vector: Index
    partial: Index  # where its results go


@dataclasses.dataclass(frozen=True)
class Columns:
    """`x` is (ensemble, length, channels), and a tile lanes of channels."""

    ensemble: int
    length: int
    channels: int
    tiling: Tiling
    axis = 0

    @property
    def programs(self) -> int:
        return self.ensemble * self.tiling.slices * self._blocks

    @property
    def partials(self) -> tuple[int, int, int]:
        """The shape of its results."""
        return self.ensemble, self.tiling.slices, self.channels

    @property
    def _blocks(self) -> int:
        return -(-self.channels // self.tiling.across)

    def counts(self, partial: Array) -> Array:
        """How many values there are in the partial results of these numbers."""
        return _lengths(self.length, self.tiling, partial)

    def view(self, x: Array) -> Array:
        """Of a mask, with 1 channel."""
        # Free where channels are the last axis in memory, as between convolutions.
        return jnp.moveaxis(x, -2, -1).reshape(-1, self.length, x.shape[-2])

    def here(self, program: Array) -> Here:
        # Programs side by side read what lies side by side.
        rest, block = _divided(program, self._blocks)
        member, slice_ = _divided(rest, self.tiling.slices)
        own = block * self.tiling.across + _iota(self.tiling.across)
        exists = None if self.channels % self.tiling.across == 0 else own < self.channels
        return Here(
            slice_ * self.tiling.slice,
            _iota(self.tiling.lanes)[:, None],
            own[None, :],
            None if exists is None else exists[None, :],
            (member, own[None, :]),
            (member, slice_, own),
        )

    def values(self, here: Here, along: Array) -> Index:
        return here.vector[0], along, here.own

    def mask(self, here: Here, along: Array) -> Index:
        return here.vector[0], along, np.int32(0)


@dataclasses.dataclass(frozen=True)
class Rows:
    """`x` is (ensemble * examples * channels, length), and a tile rows of lanes."""

    ensemble: int
    examples: int
    channels: int
    length: int
    tiling: Tiling
    axis = 1

    @property
    def programs(self) -> int:
        return self.tiling.slices * self._blocks

    @property
    def partials(self) -> tuple[int, int, int]:
        """The shape of its results."""
        return self.ensemble, self.examples * self.tiling.slices, self.channels

    @property
    def _rows(self) -> int:
        return self.ensemble * self.examples * self.channels

    @property
    def _blocks(self) -> int:
        return -(-self._rows // self.tiling.across)

    def counts(self, partial: Array) -> Array:
        """How many values there are in the partial results of these numbers."""
        _, slice_ = _divided(partial, self.tiling.slices)
        return _lengths(self.length, self.tiling, slice_)

    def view(self, x: Array) -> Array:
        """Of a mask, with as many rows less as it has no channels."""
        return x.reshape(-1, self.length)

    def here(self, program: Array) -> Here:
        block, slice_ = _divided(program, self.tiling.slices)
        own = block * self.tiling.across + _iota(self.tiling.across)
        exists = None if self._rows % self.tiling.across == 0 else own < self._rows
        rest, channel = _divided(own, self.channels)
        member, example = _divided(rest, self.examples)
        return Here(
            slice_ * self.tiling.slice,
            _iota(self.tiling.lanes)[None, :],
            own[:, None],
            None if exists is None else exists[:, None],
            (member[:, None], channel[:, None]),
            (member, example * self.tiling.slices + slice_, channel),
        )

    def values(self, here: Here, along: Array) -> Index:
        return here.own, along

    def mask(self, here: Here, along: Array) -> Index:
        return _divided(here.own, self.channels)[0], along


# How an array (*ensemble, examples, channels, values) is read.
Geometry = Columns | Rows


def _lengths(length: int, tiling: Tiling, slice_: Array) -> Array:
    return jnp.clip(length - slice_ * tiling.slice, 0, tiling.slice)


def _iota(size: int) -> Array:
    # 32 bits, whatever jax_enable_x64 says.
    return lax.iota(np.int32, size)


def _divided(number: Array, by: int) -> tuple[Array, Array]:
    """Quotient and remainder; `//` and `%` fail in Triton, with jax 0.10.2 to 0.12.0.1."""
    if by == 1:
        return number, jnp.zeros_like(number)
    divisor = jnp.full_like(number, by)
    return lax.div(number, divisor), lax.rem(number, divisor)
