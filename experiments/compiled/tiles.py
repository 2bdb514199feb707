"""Asks the package how a kernel cuts up its work.

The only module of the experiments that imports private modules of the package. The code of a
kernel does not tell how large its tiles are, and by them is known how many loads of 16 bytes
there have to be.
"""

import math
from typing import NamedTuple

import jax

from eqx_norm._normalise.gpu import tiles, tiling, triton_rows

from .cases import BATCH_NORM, Case


class Cut(NamedTuple):
    """Says what a program of a kernel reads at once."""

    tile: tuple[int, int]
    chunk: int  # of so many tiles
    line: int  # bytes of x that lie side by side


def cut(case: Case, kernel: str) -> Cut | None:
    """Returns how x is read by one of the kernels of a program; `None` by one that merges."""
    inputs = {"statistics": 1, "vjp_sums": 2}
    held = {"rows": tiling.FORWARD, "rows_vjp": tiling.LEARNING}
    if kernel in inputs:
        read = tiles.geometry(_inside(case), inputs[kernel])
    elif kernel in held:
        read = triton_rows.geometry_of(case.x, held[kernel])
    else:
        return None
    line = read.length if read.axis else read.channels
    return Cut(read.tile, read.tiling.unroll, line * case.x.dtype.itemsize)


def _inside(case: Case) -> jax.ShapeDtypeStruct:
    """Returns x as the kernels are given it: (*ensemble, examples, channels, values)."""
    examples, *shape = case.shape
    if case.program == BATCH_NORM:
        inside = (examples, shape[0], math.prod(shape[1:]))
    else:  # every example is normalised by itself
        inside = (examples, 1, 1, math.prod(shape))
    return jax.ShapeDtypeStruct(inside, case.dtype)
