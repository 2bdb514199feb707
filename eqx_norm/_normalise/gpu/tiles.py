"""Tells where a program finds its values: in columns, or in rows.

Say x of 8 examples, 64 channels and 1 value. In columns it is (1, 8, 64); a tile might be
4 x 32 of it, and is reduced along its first axis. LayerNorm's x of 1 channel and 768 values,
mapped over 512 examples, is (512, 768) in rows; a tile might be 4 x 256, and is reduced along
its second axis. Both have vectors of (ensemble, channels), and give partial results of
(ensemble, partials, channels), to be merged.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from . import tiling
from .tiling import Tiling

# An index of a reference: scalars and arrays that broadcast.
Index = tuple[Any, ...]


class Here(NamedTuple):
    """Tells what one program works on, by indices that broadcast to a tile."""

    start: Array  # of its slice, along what is reduced
    lane: Array
    own: Array  # channels or rows that are not reduced
    exists: Array | None  # which of these there are; None: all
    vector: Index
    partial: Index  # where its results go


@dataclasses.dataclass(frozen=True)
class Columns:
    """Reads `x` as (ensemble, length, channels), in tiles of lanes x channels."""

    ensemble: int
    length: int
    channels: int
    tiling: Tiling
    axis = 0  # along which a tile is reduced

    @property
    def programs(self) -> int:
        return self.ensemble * self.tiling.slices * self._blocks

    @property
    def partials(self) -> tuple[int, int, int]:
        """Returns the shape of the programs' results."""
        return self.ensemble, self.tiling.slices, self.channels

    @property
    def tile(self) -> tuple[int, int]:
        return self.tiling.lanes, self.tiling.across

    @property
    def _blocks(self) -> int:
        return tiling.blocks(self.channels, self.tiling.across)

    def counts(self, partial: Array) -> Array:
        """Returns how many values there are in the partial results of these numbers."""
        return _lengths(self.length, self.tiling, partial)

    def view(self, x: Array) -> Array:
        """Returns an array, or a mask with 1 channel, as programs read it."""
        # Free where channels are the last axis in memory, as between convolutions.
        return jnp.moveaxis(x, -2, -1).reshape(-1, self.length, x.shape[-2])

    def here(self, program: Array) -> Here:
        # Programs side by side read what lies side by side.
        rest, block = _divided(program, self._blocks)
        member, slice_ = _divided(rest, self.tiling.slices)
        own, exists = _own(self.tiling, block, self.channels)
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
    """Reads `x` as (ensemble * examples * channels, length), in tiles of rows x lanes."""

    ensemble: int
    examples: int
    channels: int
    length: int
    tiling: Tiling
    axis = 1

    @property
    def programs(self) -> int:
        return self.tiling.slices * tiling.blocks(self._rows, self.tiling.across)

    @property
    def partials(self) -> tuple[int, int, int]:
        return self.ensemble, self.examples * self.tiling.slices, self.channels

    @property
    def tile(self) -> tuple[int, int]:
        return self.tiling.across, self.tiling.lanes

    @property
    def _rows(self) -> int:
        return self.ensemble * self.examples * self.channels

    def counts(self, partial: Array) -> Array:
        return _lengths(self.length, self.tiling, _divided(partial, self.tiling.slices)[1])

    def view(self, x: Array) -> Array:
        return x.reshape(-1, self.length)

    def here(self, program: Array) -> Here:
        block, slice_ = _divided(program, self.tiling.slices)
        own, exists = _own(self.tiling, block, self._rows)
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


Geometry = Columns | Rows


def geometry(x: Any, inputs: int) -> Geometry:
    """Returns how `inputs` arrays like x are read together, to be summed by channel."""
    *outer, examples, channels, values = x.shape
    ensemble, itemsize = math.prod(outer), x.dtype.itemsize
    if not tiling.by_rows(x.shape):
        length = examples * values
        tiles = tiling.columns(ensemble, length, channels, itemsize, inputs)
        return Columns(ensemble, length, channels, tiles)
    if channels == 1:
        # All examples are one row.
        examples, values = 1, examples * values
    tiles = tiling.rows(ensemble * examples * channels, values, itemsize, inputs)
    return Rows(ensemble, examples, channels, values, tiles)


def _lengths(length: int, tiling: Tiling, slice_: Array) -> Array:
    return jnp.clip(length - slice_ * tiling.slice, 0, tiling.slice)


def _own(tiling: Tiling, block: Array, size: int) -> tuple[Array, Array | None]:
    """Returns the channels or rows of a block, and which of them are below `size`."""
    own = block * tiling.across + _iota(tiling.across)
    return own, None if size % tiling.across == 0 else own < size


def _iota(size: int) -> Array:
    # 32 bits, whatever jax_enable_x64 says.
    return lax.iota(np.int32, size)


def _divided(number: Array, by: int) -> tuple[Array, Array]:
    """Returns quotient and remainder; `//` and `%` fail in Triton, jax 0.10.2 to 0.12.0.1."""
    if by == 1:
        return number, jnp.zeros_like(number)
    divisor = jnp.full_like(number, by)
    return lax.div(number, divisor), lax.rem(number, divisor)
