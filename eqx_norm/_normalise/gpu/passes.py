"""Computes the two passes that sum over x as kernels for GPUs: each of them reads x once.

`Backend.statistics` computes what `reference.statistics` does, and `Backend.vjp_sums` the sums
of an activation's jvp. A program reads one slice of x (`tiling`, `tiles`) and keeps moments in
its registers (`lanes`); if there are several slices, another kernel merges their results, in a
fixed order, without atomics. Everything is calculated in float32, whatever is read.

XLA, which can only add up, has to read x once for the mean and again for what deviates from
it; and it reads x and g, or writes out the activation's jvp, twice if that is not cheap.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from eqx_norm._normalise import reference
from eqx_norm._normalise.reference import Activation

from . import activations, tiling
from . import lanes as lanes_of
from .lanes import Lanes, Places, Totals
from .tiles import Columns, Geometry, geometry

_DTYPES = ("float32", "bfloat16", "float16")
# Indices have 32 bits.
MOST = 2**31 - 2**16


# A kernel is given what reads and writes for one program, chunk after chunk of its slice:
#
#     axis                           along which a tile is reduced
#     over_chunks(step, carry)       carry = step(carry, chunk, places), for each chunk
#     tiles(chunk, places)           for each of the places a tile of each array, in float32
#     counted(chunk, places)         the places, less those that the mask leaves out
#     vectors()                      vectors of the program's channels
#     partials()                     numbers of partial results, which there are; a tile of each
#     zero(), no_lanes(masked)       a tile of zeros; lanes that have seen no value yet
#     restated(function)             the function in terms that the backend knows
#     write(results)                 a value for each channel, to each output
Kernel = Callable[[Any], None]


class Inputs(NamedTuple):
    """Holds arrays that `Geometry.view` gave, vectors (ensemble, channels), a mask or none."""

    arrays: Sequence[Array]
    vectors: Sequence[Array] = ()
    mask: Sequence[Array] = ()

    def split(self, refs: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
        """Returns the references to each of these, and to as many others as `sizes` say."""
        ends = list(itertools.accumulate((*map(len, self), *sizes)))
        return [refs[start:end] for start, end in itertools.pairwise((0, *ends))]


@dataclasses.dataclass(frozen=True)
class Backend(abc.ABC):
    """Runs kernels by one of Pallas's backends, or by the interpreter that it has."""

    interpret: Any = False

    # How many partial results a merge reads at least.
    least_merged: ClassVar[int] = 1
    # Primitives that a kernel cannot compute, of those that `activations` knows.
    lacking: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def refuses(self, x: Any, mask: Any) -> str | None:
        """Returns `None`, or why this machine or backend has no kernel for such an x."""

    @abc.abstractmethod
    def call(
        self, kernel: Kernel, reading: Geometry, inputs: Inputs, results: int, name: str
    ) -> list[Array]:
        """Returns what the programs of the kernel write: arrays of `reading.partials`.

        There may be more partial results than that, which mean nothing.
        """

    def serves(self, x: Any, mask: Any = None, activation: Any = None) -> str | None:
        """Returns `None`, or why there is no kernel for arrays of this shape and dtype."""
        if jnp.dtype(x.dtype).name not in _DTYPES:
            return f"x is {jnp.dtype(x.dtype).name}; the kernels take {', '.join(_DTYPES)}"
        if 0 in x.shape:
            return f"x is empty, of shape {x.shape}"
        if (reason := self.refuses(x, mask)) is not None:
            return reason
        if activation and (unknown := activations.unknown(activation, self.lacking)):
            return (
                f"activation={activation} is made of {', '.join(sorted(unknown))}, which the "
                "kernels cannot compute"
            )
        return None

    def statistics(self, x: Array, mask: Array | None = None) -> tuple[Array, ...]:
        """Returns count, mean, m2 and mean_rest of each channel: see `reference.statistics`.

        One kernel reads x, and another the results of its slices.
        """
        *ensemble, _, channels, _ = x.shape
        reading, masked = geometry(x, 1), mask is not None
        inputs = Inputs([reading.view(x)], mask=_mask_view(reading, x, mask))
        kernel = functools.partial(_statistics_kernel, masked)
        partial = self.call(kernel, reading, inputs, 3 + masked, "eqx_norm_statistics")
        # Without a mask, the counts are known, and written only by a merge: each of rows'
        # partial results may be of another number of values.
        counts = None if masked else reading.counts
        name = "eqx_norm_merge_statistics"
        for columns in self._merges(reading.partials):
            kernel = functools.partial(_merge_moments_kernel, counts)
            partial = self.call(kernel, columns, Inputs(partial), 4, name)
            counts = None
        if not masked:
            partial = [jnp.full_like(partial[-1], x.shape[-3] * x.shape[-1]), *partial[-3:]]
        return tuple(array.reshape(*ensemble, channels) for array in partial)

    def vjp_sums(
        self,
        activation: Activation | None,
        g: Array,
        bias: Array | None,
        scale: Array | None,
        x: Array,
        mean: Array,
        mean_rest: Array,
        mask: Array | None = None,
    ) -> tuple[Array, ...]:
        """Returns `reference.sums` of `reference.activation_jvp(activation, g, bias, ...)`.

        If `activation` is None they are those of g, and bias and scale are not used. One kernel
        reads x and g, and another the results of its slices. Vectors are `(*ensemble, 1,
        channels, 1)` in float32.
        """
        *ensemble, _, channels, _ = x.shape
        shape = (*ensemble, 1, channels, 1)
        reading = geometry(x, 2)
        affine = [] if activation is None else [bias, scale]
        vectors = [
            jnp.broadcast_to(jnp.asarray(vector, jnp.float32), shape).reshape(-1, channels)
            for vector in (mean, mean_rest, *affine)
        ]
        arrays = [reading.view(x), reading.view(g)]
        inputs = Inputs(arrays, vectors, _mask_view(reading, x, mask))
        kernel = functools.partial(_sums_kernel, activation)
        partial = self.call(kernel, reading, inputs, 2, "eqx_norm_vjp_sums")
        sum_g, sum_gd = self.merged_sums(partial, reading.partials)
        return sum_g.reshape(shape), sum_gd.reshape(shape)

    def merged_sums(self, partial: list[Array], shape: tuple[int, int, int]) -> list[Array]:
        """Returns the sums (ensemble, 1, channels) of partial ones, which have this shape."""
        for columns in self._merges(shape):
            inputs, name = Inputs(partial), "eqx_norm_merge_sums"
            partial = self.call(_merge_sums_kernel, columns, inputs, len(partial), name)
        return partial

    def _merges(self, shape: tuple[int, int, int]) -> Iterator[Columns]:
        """Yields how partial results of this shape are read, until there is one a channel."""
        while shape[1] > 1:
            columns = Columns(*shape, tiling.merge(*shape[1:], self.least_merged))
            yield columns
            shape = columns.partials


def too_many(x: Any) -> str:
    """Returns why a kernel cannot serve x, if it has more rows than indices."""
    return f"x of shape {x.shape} has more rows than a kernel can count"


def _mask_view(reading: Geometry, x: Array, mask: Array | None) -> list[Array]:
    if mask is None:
        return []
    shape = (*x.shape[:-2], 1, x.shape[-1])
    return [reading.view(jnp.broadcast_to(mask, shape))]


# --- What a program of each kernel does.


def _statistics_kernel(masked: bool, program: Any) -> None:
    def step(lanes: Lanes, chunk: Any, places: Places) -> Lanes:
        tiles = [x for (x,) in program.tiles(chunk, places)]
        if masked:
            places = program.counted(chunk, places)
            lanes = lanes_of.started(lanes, tiles, places)
        elif lanes.shift is None:
            lanes = lanes._replace(shift=tiles[0])
        return lanes_of.extended(lanes, tiles, places)

    lanes = program.over_chunks(step, program.no_lanes(masked))
    moments = lanes_of.merged(lanes, program.axis)
    program.write(moments if masked else moments[1:])


def _sums_kernel(activation: Activation | None, program: Any) -> None:
    mean, mean_rest, *affine = program.vectors()
    derivative = program.restated(
        functools.partial(reference.activation_jvp, activation=activation)
    )

    def step(totals: Totals, chunk: Any, places: Places) -> Totals:
        tiles = program.tiles(chunk, places)
        places = program.counted(chunk, places)
        gs, ds = [], []
        for x, g in tiles:
            gs.append(g if activation is None else derivative(g, *affine, x, mean, mean_rest))
            ds.append(reference.centred(x, mean, mean_rest))
        gs, ds = lanes_of.zeroed(gs, places), lanes_of.zeroed(ds, places)
        return lanes_of.added(totals, gs, [g * d for g, d in zip(gs, ds, strict=True)])

    zero = program.zero()
    totals = program.over_chunks(step, Totals(zero, zero, zero, zero))
    program.write([lanes_of.total(sum_, program.axis) for sum_ in (totals.g, totals.gd)])


def _merge_moments_kernel(counts: Callable[[Array], Array] | None, program: Any) -> None:
    """Merges moments of which `counts` tells the first, where it was not written."""
    partial, within, moments = program.partials()
    if counts is not None:
        moments = [jnp.where(within, counts(partial), 0).astype(jnp.float32), *moments]
    program.write(lanes_of.merged(Lanes(*moments), program.axis))


def _merge_sums_kernel(program: Any) -> None:
    *_, sums = program.partials()
    program.write([lanes_of.total(sum_, program.axis) for sum_ in sums])
