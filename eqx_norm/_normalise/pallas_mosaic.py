"""The two passes that sum over x, as kernels for GPUs from an H100 on, by Pallas's Mosaic GPU.

What `pallas_triton` does for any shape by a backend that jax deprecates, for columns that fill
whole lines: the same cut of the work (`tiling`), the same moments in the registers
(`pallas_triton_lanes`), the same merge in a fixed order. What differs is how values get there
(`pallas_mosaic_ring`): not by each thread's loads but copied ahead to shared memory.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from . import pallas_mosaic_activations as activations
from . import pallas_mosaic_kernels as kernels
from . import tiling
from .pallas_mosaic_ring import GRID, TILE, plgpu, scratch
from .pallas_triton_tiles import Columns
from .reference import Activation

_DTYPES = ("float32", "bfloat16", "float16")
# Indices have 32 bits.
_MOST = 2**31 - 2**16
# The bytes of a line of memory. A tile is one wide: its rows are copied whole.
_LINE = 128
# Of programs there are no more along one axis.
_PROGRAMS = 2**16 - 1
# The first that is known to lower these kernels: 0.10.2 fails to infer in which registers a
# tile is ("This is a bug"); 0.11 was not tried.
_VERSION = (0, 12)
# The first GPUs that copy ahead by themselves: H100.
_CAPABILITY = (9, 0)


def serves(x: Any, mask: Any = None, activation: Activation | None = None) -> str | None:
    """`None`, or why there is no kernel for arrays of this shape and dtype."""
    if plgpu is None or jax.__version_info__ < _VERSION:
        least = ".".join(map(str, _VERSION))
        return f"the Mosaic kernels take jax {least}, and this is jax {jax.__version__}"
    too_old = _too_old()
    if too_old is not None:
        return f"a Mosaic kernel runs on an H100 or a later GPU, and this is {too_old}"
    dtype = jnp.dtype(x.dtype)
    if dtype.name not in _DTYPES:
        return f"x is {dtype.name}; the kernels take {', '.join(_DTYPES)}"
    if 0 in x.shape:
        return f"x is empty, of shape {x.shape}"
    if mask is not None:
        return "a Mosaic kernel takes no mask"
    across = _LINE // dtype.itemsize
    if x.shape[-2] % across:
        return (
            f"a Mosaic kernel reads tiles of {across} channels of {dtype.name}, "
            f"and x has {x.shape[-2]}"
        )
    if tiling.by_rows(x.shape):
        return f"a Mosaic kernel reads channels side by side, and x of shape {x.shape} has rows"
    if x.shape[-3] * x.shape[-1] > _MOST or _most_programs(x) > _PROGRAMS:
        return f"x of shape {x.shape} has more rows than a kernel can count"
    unknown = set() if activation is None else activations.unknown(activation)
    if unknown:
        return (
            f"activation={activation} is made of {', '.join(sorted(unknown))}, which the "
            "kernels cannot compute"
        )
    return None


def statistics(
    x: Array, mask: None = None, *, interpret: Any = False
) -> tuple[Array, Array, Array, Array]:
    """See `reference.statistics`; one pass over x, and one over the results of its slices.

    `interpret` is for tests: `True`, or Mosaic's `InterpretGPUParams`.
    """
    del mask
    *ensemble, examples, channels, values = x.shape
    columns = geometry(x, 1)
    call = functools.partial(_call, results=3, interpret=interpret)
    partial = call(
        kernels.statistics_kernel, columns, [columns.view(x)], name="eqx_norm_statistics"
    )
    length, each = columns.length, columns.tiling.slice
    while columns.tiling.slices > 1:
        columns = merging(columns)
        merge = functools.partial(kernels.merged_moments, length, each)
        kernel = functools.partial(kernels.merge_kernel, merge=merge)
        partial = call(kernel, columns, partial, name="eqx_norm_merge_statistics")
        each *= columns.tiling.slice
    mean, rest, m2 = (array[:, 0].reshape(*ensemble, channels) for array in partial)
    return jnp.full_like(m2, examples * values), mean, rest, m2


def pulled_sums(
    activation: Activation | None,
    g: Array,
    a: Array | None,
    b: Array | None,
    x: Array,
    mean: Array,
    rest: Array,
    mask: None = None,
    *,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """`reference.sums` of `reference.slope(activation, g, a, b, x, mean, rest)`.

    Of g itself, if `activation` is None; then a and b are not used. One pass over x and g, and
    one over the results of its slices. Vectors are `(*ensemble, 1, channels, 1)` in float32.
    """
    del mask
    columns = geometry(x, 2)
    *ensemble, _, channels, _ = x.shape
    vectors = [mean, rest] if activation is None else [mean, rest, a, b]
    shape = (*ensemble, 1, channels, 1)
    vectors = [
        jnp.broadcast_to(jnp.asarray(vector, jnp.float32), shape).reshape(-1, channels)
        for vector in vectors
    ]
    call = functools.partial(_call, results=2, interpret=interpret)
    kernel = functools.partial(kernels.sums_kernel, activation=activation)
    arrays = [columns.view(x), columns.view(g)]
    partial = call(kernel, columns, arrays, vectors, name="eqx_norm_pulled_sums")
    while columns.tiling.slices > 1:
        columns = merging(columns)
        kernel = functools.partial(kernels.merge_kernel, merge=kernels.merged_sums)
        partial = call(kernel, columns, partial, name="eqx_norm_merge_sums")
    sum_g, sum_gd = (array[:, 0].reshape(shape) for array in partial)
    return sum_g, sum_gd


# --- Around them.


def geometry(x: Any, inputs: int) -> Columns:
    """How `inputs` arrays like x are read together."""
    *outer, examples, channels, values = x.shape
    ensemble, length = math.prod(outer), examples * values
    tiles = tiling.columns(ensemble, length, channels, x.dtype.itemsize, inputs)
    return Columns(ensemble, length, channels, tiles)


def merging(columns: Columns) -> Columns:
    """How the partial results of these are merged."""
    ensemble, partials, channels = columns.partials
    tiles = tiling.merge(partials, channels)
    # What there is to do for a warpgroup at least.
    tiles = tiles._replace(lanes=max(tiles.lanes, TILE // tiles.across))
    return Columns(ensemble, partials, channels, tiles)


def _call(
    kernel: Callable[..., None],
    columns: Columns,
    arrays: Sequence[Array],
    vectors: Sequence[Array] = (),
    *,
    results: int,
    name: str,
    interpret: Any,
) -> list[Array]:
    tiles = columns.tiling
    # As the operands do, results vary over the axes of a mesh.
    varies = jax.typeof(arrays[-1]).manual_axis_type
    # A merge copies 4 rows at least; what is in those that nobody wrote, it does not look at.
    slices = 1 if tiles.slices == 1 else -(-tiles.slices // 4) * 4
    shape = columns.ensemble, slices, columns.channels
    out = jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varies)
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    return plgpu.kernel(
        functools.partial(kernel, columns),
        out_type=[out] * results,
        scratch_types=scratch(columns, [array.dtype for array in arrays]),
        grid=(columns.ensemble, tiles.slices, columns.channels // tiles.across),
        grid_names=GRID,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Room for one sum by each thread, of as many values as it holds of a tile's row.
            reduction_scratch_bytes=TILE * 4,
        ),
        kernel_name=name,
        interpret=interpret,
    )(*arrays, *vectors)


def _most_programs(x: Any) -> int:
    columns = geometry(x, 2)
    return max(columns.ensemble, columns.tiling.slices)


def _too_old() -> str | None:
    """The name of the GPU here, if it is one of before."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:  # compiled for one elsewhere
        return None
    capability = tuple(int(part) for part in device.compute_capability.split("."))
    return device.device_kind if capability < _CAPABILITY else None
