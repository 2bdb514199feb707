"""The two passes that sum over x, as kernels for GPUs: each of them reads x once.

`statistics` and `pulled_sums` are what `reference.statistics` and, of a slope, `reference.sums`
are, by Pallas's Triton backend, from an A100 on. A program reads one slice (`tiling`,
`pallas_triton_tiles`) and keeps moments in its registers (`pallas_triton_lanes`); if there are
several slices, another kernel merges their results, in a fixed order. Nothing is added
atomically, and everything is calculated in float32.

XLA, which can only add up, has to read x once for the mean and again for what deviates from
it; and it reads x and g, or writes out the slope, twice if the slope is not cheap.

That backend is deprecated since jax 0.11 and says so wherever one of its kernels is lowered:
lower them under `kernels.quiet()`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from . import pallas_triton_activations as activations
from . import pallas_triton_kernels as kernels
from . import tiling
from .pallas_triton_kernels import pl, triton
from .pallas_triton_tiles import Columns, Geometry, Rows
from .reference import Activation
from .tiling import Tiling

_DTYPES = ("float32", "bfloat16", "float16")
# Indices have 32 bits.
_MOST = 2**31 - 2**16


def serves(x: Any, mask: Any = None, activation: Activation | None = None) -> str | None:
    """`None`, or why there is no kernel for arrays of this shape and dtype."""
    del mask
    if triton is None:
        return f"jax {jax.__version__} has no Pallas-Triton backend"
    if jnp.dtype(x.dtype).name not in _DTYPES:
        return f"x is {jnp.dtype(x.dtype).name}; the kernels take {', '.join(_DTYPES)}"
    if 0 in x.shape:
        return f"x is empty, of shape {x.shape}"
    if max(math.prod(x.shape[:-1]), x.shape[-3] * x.shape[-1]) > _MOST:
        return f"x of shape {x.shape} has more rows than a kernel can count"
    unknown = set() if activation is None else activations.unknown(activation)
    if unknown:
        return (
            f"activation={activation} is made of {', '.join(sorted(unknown))}, which the "
            "kernels cannot compute"
        )
    return None


def statistics(
    x: Array, mask: Array | None = None, *, interpret: bool = False
) -> tuple[Array, Array, Array, Array]:
    """See `reference.statistics`; one pass over x, and one over the results of its slices."""
    *ensemble, _, channels, _ = x.shape
    reading = geometry(x, 1)
    arrays = [reading.view(x), *_mask_view(reading, x, mask)]
    shape = reading.partials
    partial = call(
        functools.partial(kernels.statistics_kernel, reading, mask is not None),
        arrays,
        [(shape, jnp.float32)] * (3 if mask is None else 4),
        reading.programs,
        reading.tiling,
        "eqx_norm_statistics",
        interpret,
    )
    counts = reading.counts if mask is None else None
    while partial[0].shape[1] > 1:
        merge = functools.partial(kernels.merged_moments, counts)
        partial = merged(merge, partial, 4, "eqx_norm_merge_statistics", interpret)
        counts = None
    if mask is None:
        # Known, and so not read.
        n = x.shape[-3] * x.shape[-1]
        partial = [jnp.full_like(partial[-1], n), *partial[-3:]]
    count, mean, rest, m2 = (array.reshape(*ensemble, channels) for array in partial)
    return count, mean, rest, m2


def pulled_sums(
    activation: Activation | None,
    g: Array,
    a: Array | None,
    b: Array | None,
    x: Array,
    mean: Array,
    rest: Array,
    mask: Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`reference.sums` of `reference.slope(activation, g, a, b, x, mean, rest, mask)`.

    Of g itself, if `activation` is None; then a and b are not used. One pass over x and g, and
    one over the results of its slices. Vectors are `(*ensemble, 1, channels, 1)` in float32.
    """
    reading = geometry(x, 2)
    *ensemble, _, channels, _ = x.shape
    vectors = [mean, rest] if activation is None else [mean, rest, a, b]
    shape = (*ensemble, 1, channels, 1)
    vectors = [
        jnp.broadcast_to(jnp.asarray(vector, jnp.float32), shape).reshape(-1, channels)
        for vector in vectors
    ]
    partial = call(
        functools.partial(kernels.sums_kernel, reading, activation, mask is not None),
        [reading.view(x), reading.view(g), *vectors, *_mask_view(reading, x, mask)],
        [(reading.partials, jnp.float32)] * 2,
        reading.programs,
        reading.tiling,
        "eqx_norm_pulled_sums",
        interpret,
    )
    while partial[0].shape[1] > 1:
        partial = merged(kernels.merged_sums, partial, 2, "eqx_norm_merge_sums", interpret)
    sum_g, sum_gd = (array.reshape(shape) for array in partial)
    return sum_g, sum_gd


# --- Around them.


def geometry(x: Any, inputs: int) -> Geometry:
    """How `inputs` arrays like x are read together."""
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


def _mask_view(geometry: Geometry, x: Array, mask: Array | None) -> list[Array]:
    if mask is None:
        return []
    shape = (*x.shape[:-2], 1, x.shape[-1])
    return [geometry.view(jnp.broadcast_to(mask, shape))]


def merged(
    merge: Callable[..., Sequence[Array]],
    partial: list[Array],
    results: int,
    name: str,
    interpret: bool,
) -> list[Array]:
    ensemble, partials, channels = partial[0].shape
    tiles = tiling.merge(partials, channels)
    columns = Columns(ensemble, partials, channels, tiles)
    kernel = functools.partial(kernels.merge_kernel, columns, len(partial), merge)
    shapes = [(columns.partials, jnp.float32)] * results
    return call(kernel, partial, shapes, columns.programs, tiles, name, interpret)


def call(
    kernel: Callable[..., None],
    arrays: Sequence[Array],
    shapes: Sequence[tuple[tuple[int, ...], Any]],
    programs: int,
    tiles: Tiling,
    name: str,
    interpret: bool,
) -> list[Array]:
    # As the operands do, results vary over the axes of a mesh.
    varies = jax.typeof(arrays[-1]).manual_axis_type
    outs = [jax.ShapeDtypeStruct(*s, manual_axis_type=varies) for s in shapes]
    # Nothing is copied ahead in shared memory: a chunk has its loads side by side.
    parameters = triton.CompilerParams(num_warps=tiles.warps, num_stages=1)
    return list(
        pl.pallas_call(
            kernel,
            out_shape=outs,
            grid=(programs,),
            compiler_params=parameters,
            interpret=interpret,
            name=name,
        )(*arrays)
    )
