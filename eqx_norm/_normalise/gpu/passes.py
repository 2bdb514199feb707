"""The two passes that sum over x, as kernels for GPUs: each of them reads x once.

`Backend.statistics` and `Backend.pulled_sums` compute what `reference.statistics` and, of a
slope, `reference.sums` compute. A program reads one slice of x (`tiling`, `tiles`) and keeps
moments in its registers (`lanes`); if there are several slices, another kernel merges their
results, in a fixed order. Nothing is added atomically, and everything is calculated in float32,
whatever is read.

XLA, which can only add up, has to read x once for the mean and again for what deviates from
it; and it reads x and g, or writes out the slope, twice if the slope is not cheap.

How values get from memory to the registers is up to the backend: here, a kernel is a function
of a `Program`, which reads and writes for it.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

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


class Program(Protocol):
    """Reads and writes what one program of a kernel works on."""

    @property
    def axis(self) -> int:
        """Returns the axis along which a tile is reduced."""
        ...

    def zero(self) -> Array:
        """Returns a tile of zeros."""
        ...

    def no_lanes(self, masked: bool) -> Lanes:
        """Returns lanes without values; their shift is `None` if the first chunk may set it.

        If it may not, and nothing is masked, the shift is the first tile of the slice: a lane
        that has no value there has none at all.
        """
        ...

    def over_chunks(self, step: Callable[[Any, Any, Places], Any], carry: Any) -> Any:
        """Computes `carry = step(carry, chunk, places)` for each chunk of the slice."""
        ...

    def tiles(self, chunk: Any, places: Places) -> Iterable[Sequence[Array]]:
        """Yields a tile of each array, in float32, as often as there are `places`."""
        ...

    def counted(self, chunk: Any, places: Places) -> Places:
        """Returns the places that are there and that the mask, if there is one, counts."""
        ...

    def vectors(self) -> Sequence[Array]:
        """Returns the vectors of this program's channels, which broadcast to a tile."""
        ...

    def restated(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Returns the function in terms that the backend knows."""
        ...

    def partials(self) -> tuple[Array, Array, Sequence[Array]]:
        """Returns numbers of partial results, which of them there are, and a tile of each."""
        ...

    def write(self, results: Sequence[Array]) -> None:
        """Writes a value for each channel to each of the outputs."""


Kernel = Callable[[Any], None]


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
        self,
        kernel: Kernel,
        reading: Geometry,
        arrays: Sequence[Array],
        results: int,
        name: str,
        *,
        vectors: Sequence[Array] = (),
        mask: Sequence[Array] = (),
    ) -> list[Array]:
        """Returns what the programs of the kernel write, arrays of `reading.partials`."""

    @abc.abstractmethod
    def merged_moments(
        self, partial: list[Array], reading: Geometry, masked: bool
    ) -> list[Array]:
        """Merges partial moments until there is one for each channel."""

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
        """Returns count, mean, rest and m2 of each channel, as `reference.statistics` does.

        One kernel reads x, and another the results of its slices.
        """
        *ensemble, _, channels, _ = x.shape
        reading, masked = geometry(x, 1), mask is not None
        partial = self.call(
            functools.partial(_statistics_kernel, masked),
            reading,
            [reading.view(x)],
            3 + masked,
            "eqx_norm_statistics",
            mask=_mask_view(reading, x, mask),
        )
        moments = self.merged_moments(partial, reading, masked)
        if not masked:
            # Known, and so not read.
            n = x.shape[-3] * x.shape[-1]
            moments = [jnp.full_like(moments[-1], n), *moments[-3:]]
        return tuple(array.reshape(*ensemble, channels) for array in moments)

    def pulled_sums(
        self,
        activation: Activation | None,
        g: Array,
        a: Array | None,
        b: Array | None,
        x: Array,
        mean: Array,
        rest: Array,
        mask: Array | None = None,
    ) -> tuple[Array, ...]:
        """Returns `reference.sums` of `reference.slope(activation, g, a, b, x, mean, ...)`.

        If `activation` is None they are those of g, and a and b are not used. One kernel reads
        x and g, and another the results of its slices. Vectors are `(*ensemble, 1, channels,
        1)` in float32.
        """
        *ensemble, _, channels, _ = x.shape
        shape = (*ensemble, 1, channels, 1)
        reading = geometry(x, 2)
        vectors = [mean, rest] if activation is None else [mean, rest, a, b]
        partial = self.call(
            functools.partial(_sums_kernel, activation),
            reading,
            [reading.view(x), reading.view(g)],
            2,
            "eqx_norm_pulled_sums",
            vectors=[
                jnp.broadcast_to(jnp.asarray(vector, jnp.float32), shape).reshape(-1, channels)
                for vector in vectors
            ],
            mask=_mask_view(reading, x, mask),
        )
        partial = self.merged_sums(partial, reading.partials)
        return tuple(array.reshape(shape) for array in partial)

    def merged_sums(self, partial: list[Array], shape: tuple[int, int, int]) -> list[Array]:
        """Merges partial sums of this shape until there is one for each channel."""
        kernel = functools.partial(merge_kernel, _merged_sums)
        for columns in self.merges(shape):
            partial = self.call(kernel, columns, partial, 2, "eqx_norm_merge_sums")
        return partial

    def merges(self, shape: tuple[int, int, int]) -> Iterator[Columns]:
        """Yields how partial results (ensemble, partials, channels) are read to be merged."""
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


def _statistics_kernel(masked: bool, program: Program) -> None:
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


def _sums_kernel(activation: Activation | None, program: Program) -> None:
    mean, rest, *affine = program.vectors()
    slope = program.restated(functools.partial(reference.slope, activation))

    def step(totals: Totals, chunk: Any, places: Places) -> Totals:
        tiles = program.tiles(chunk, places)
        places = program.counted(chunk, places)
        gs, ds = [], []
        for x, g in tiles:
            gs.append(g if activation is None else slope(g, *affine, x, mean, rest))
            ds.append(reference.centred(x, mean, rest))
        gs, ds = lanes_of.zeroed(gs, places), lanes_of.zeroed(ds, places)
        return lanes_of.added(totals, gs, [g * d for g, d in zip(gs, ds, strict=True)])

    zero = program.zero()
    totals = program.over_chunks(step, Totals(zero, zero, zero, zero))
    program.write([lanes_of.total(sum_, program.axis) for sum_ in (totals.g, totals.gd)])


def merge_kernel(merge: Callable[..., Sequence[Array]], program: Program) -> None:
    """Writes `merge(numbers, which there are, *partial results)` of a program's columns."""
    partial, within, arrays = program.partials()
    program.write(merge(partial, within, *arrays))


def _merged_sums(partial: Array, within: Array, *sums: Array) -> list[Array]:
    del partial, within
    return [lanes_of.total(sum_, Columns.axis) for sum_ in sums]
