"""Cuts up the work of a kernel, and tells when a kernel is worth its launch.

An array is read either by *columns*, as (ensemble, rows, channels) with the channels side by
side in memory, or by *rows*, as (rows, values) with the values of one channel side by side. A
program reads one slice of the rows of a block of columns, or of the values of a block of rows,
in chunks; a chunk is so many tiles, which are all asked for before the first is used. Say
(65536, 256) in bfloat16: tiles of 16 x 64, 4 in a chunk, 8 chunks in a slice of 512 rows, and
so 128 slices of 4 blocks.

Nothing here was timed: the reasons are those of the compiled programs
(experiments/results/compiled_kernels.csv), and of how these GPUs are built.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

# What a thread loads with one instruction, and what memory is read in.
_LOAD, _LINE = 16, 128
_WARP = 32
# Values that a thread holds at once: with what it adds them to, and addresses, fewer than 128
# of the 255 registers that it may have, so that 4 programs of 4 warps fit on a core.
_HELD = 32
# What a program that holds a row keeps for each of its values: x; or g, x, weight and bias; and
# the sums of those two.
FORWARD, BACKWARD, LEARNING = 1, 4, 6
# A row of so many values is held whole: more, and 16 warps would not have registers for it.
_MOST_HELD = 16384
_MOST_WARPS = 16
# Programs in all: about 4 for each of the 132 cores of an H200, the 108 of an A100 and the 148
# of a B200, so that none runs out of loads while another one sums up. And no more results for
# a channel than one program can merge.
_PROGRAMS = 512
# A slice writes 12 bytes for each channel, and another kernel reads them: beside so many bytes
# of x that is less than 3 percent.
_SLICE = 1024
# A lane adds up what it sees one chunk after the other, and rounding grows with their number.
_CHUNKS = 128
# So few channels leave most of a line unused where they are side by side, ...
_FEW = 16
# ... and so many values of a channel make up for the partial results of each example.
_MANY = 1024
# With a kernel, a normalisation takes fewer launches than XLA alone, and moves less. But of so
# few bytes launches are all that is to be seen, and XLA may do with what x is made of besides.
_WORTHWHILE = 2**20


class Tiling(NamedTuple):
    """Cuts an array: a chunk is `unroll` tiles of `lanes` x `across`, a slice `chunks` chunks.

    `lanes` and `unroll` go along what is reduced, `across` over what is not: channels in
    columns, rows in rows. There are `slices` along what is reduced.
    """

    lanes: int
    across: int
    unroll: int
    chunks: int
    slices: int
    warps: int

    @property
    def chunk(self) -> int:
        """Returns the length of one, along what is reduced."""
        return self.lanes * self.unroll

    @property
    def slice(self) -> int:
        """Returns the length of one, along what is reduced."""
        return self.chunk * self.chunks


def by_rows(shape: tuple[int, ...]) -> bool:
    """Returns whether an array (*ensemble, examples, channels, values) is read by rows.

    One channel is, since all of its values lie together. Else the channels are taken to: XLA
    gives convolutions on a GPU the layout in which they do, and a kernel that asked for another
    would have x written out again. But few channels with many values come from the user, not
    from a convolution, and lie as they do in `x`.
    """
    _, channels, values = shape[-3:]
    return channels == 1 or (channels < _FEW and values >= _MANY)


def columns(ensemble: int, rows: int, channels: int, itemsize: int, inputs: int) -> Tiling:
    """Cuts (ensemble, rows, channels), `inputs` arrays of which are read together."""
    wide = _LOAD // itemsize
    # A line of each row; no wider, since more slices would be needed for as many programs.
    across = min(_LINE // itemsize, _power_of_two(channels))
    # Small programs: four fit on a core, and a barrier holds up one of them only.
    warps = 4
    # Every thread loads once for a tile.
    lanes = warps * _WARP * wide // across
    # As many loads under way as registers allow, but no tiles beyond the last row.
    unroll = min(max(1, _HELD // wide // inputs), blocks(rows, lanes))
    chunk = lanes * unroll
    programs = ensemble * blocks(channels, across)
    # No more slices than make enough programs, ...
    chunks = blocks(rows, chunk * max(1, _PROGRAMS // programs))
    # ... none so short that its results are much to write, ...
    chunks = max(chunks, blocks(_SLICE // itemsize, chunk))
    # ... and none so long that its rounding shows.
    chunks = min(chunks, _CHUNKS, blocks(rows, chunk))
    return Tiling(lanes, across, unroll, chunks, blocks(rows, chunk * chunks), warps)


def rows(rows: int, values: int, itemsize: int, inputs: int) -> Tiling:
    """Cuts (rows, values), `inputs` arrays of which are read together."""
    wide = _LOAD // itemsize
    held = min(values, _MOST_HELD)
    # A row that one warp can hold has a warp of its own, whose sums need no barrier; a longer
    # one has as many warps as hold it, or a chunk of it.
    alone = values <= _WARP * 2 * _HELD
    warps = 4 if alone else min(_MOST_WARPS, _power_of_two(blocks(held, _WARP * _HELD)))
    lanes, across = _tile_of_rows(values, wide, warps, alone)
    # All of a row at once where it can be held; else in chunks of one length, so that only the
    # last tile of a row has to look where the row ends.
    most = blocks(held, lanes) if inputs == 1 else max(1, _HELD // wide // inputs)
    tiles = blocks(values, lanes)
    unroll = blocks(tiles, blocks(tiles, most))
    chunk = lanes * unroll
    # Slices of a row only where it is long, and there are too few rows for all programs.
    slices = max(1, _PROGRAMS // blocks(rows, across)) if values > _MOST_HELD else 1
    chunks = min(blocks(values, chunk * slices), _CHUNKS)
    return Tiling(lanes, across, unroll, chunks, blocks(values, chunk * chunks), warps)


def holds_rows(values: int, held: int) -> bool:
    """Returns whether one program's registers hold `held` numbers for each value of a row."""
    return values <= _MOST_WARPS * _WARP * _each(held)


def whole_rows(values: int, itemsize: int, held: int) -> Tiling:
    """Cuts rows of so many values, each read whole: `held` numbers are kept for each value."""
    wide, each = _LOAD // itemsize, _each(held)
    # As in `rows`: a warp to itself, or as many warps as hold it.
    alone = values <= _WARP * each
    warps = 4 if alone else max(4, _power_of_two(blocks(values, _WARP * each)))
    lanes, across = _tile_of_rows(values, wide, warps, alone)
    return Tiling(lanes, across, blocks(values, lanes), 1, 1, warps)


def _tile_of_rows(values: int, wide: int, warps: int, alone: bool) -> tuple[int, int]:
    """Returns how many values of how many rows all threads load at once."""
    threads = _WARP if alone else _WARP * warps
    # A short row is held by a part of a warp.
    lanes = min(threads * wide, _power_of_two(values))
    return lanes, warps * _WARP * wide // lanes if alone else 1


def _each(held: int) -> int:
    """Returns how many values of a row a thread takes."""
    # 16 warps leave each thread 128 registers: 48 for these, the others for addresses, and for
    # what is worked on. With twice as many values, or more numbers of each, ptxas spills some.
    return min(16, 48 // held)


def repeated(programs: int) -> int:
    """Returns how many such programs become one, which adds up over their rows.

    What it writes is 16 bytes for each value of a row, read and written: beside 8 rows or more.
    Beyond 32 rounding would show; and there should be programs enough.
    """
    return min(32, max(8, blocks(programs, _PROGRAMS)))


def merge(partials: int, channels: int, least: int = 1) -> Tiling:
    """Cuts partial results (ensemble, partials, channels), of which up to 4 arrays are read.

    At `least` so many partials are read together.
    """
    # The 32 bytes that memory moves at least.
    across = min(8, _power_of_two(channels))
    # 8 warps of 16 values: 64 of the 4 arrays.
    lanes = min(_power_of_two(partials), 8 * _WARP * 16 // across)
    # No more threads than there are places, 4 to each.
    warps = max(1, min(8, lanes * across // (_WARP * 4)))
    lanes = max(lanes, least)
    return Tiling(lanes, across, 1, 1, blocks(partials, lanes), warps)


def worthwhile(x: Any) -> bool:
    """Returns whether `implementation="auto"` takes a kernel for an array like this."""
    _, channels, values = x.shape[-3:]
    # Images of float32 lie channel after channel, as convolutions do on an A100: for a kernel
    # that reads columns x would be written out again. In half precision every convolution has
    # its channels side by side. (experiments/results/compiled_programs.csv)
    if x.dtype == jnp.float32 and channels > 1 and values > 1:
        return False
    if math.prod(x.shape) * jnp.dtype(x.dtype).itemsize < _WORTHWHILE:
        return False
    # Beside less than a line of each channel, the results would be as much as x.
    return x.shape[-3] * x.shape[-1] * jnp.dtype(x.dtype).itemsize >= _LINE


def blocks(length: int, size: int) -> int:
    """Returns how many of this size cover the length."""
    return -(-length // size)


def _power_of_two(size: int) -> int:
    """Returns the least that is not smaller: Triton knows no other sizes."""
    return 1 << (size - 1).bit_length()
