"""Chooses how each pass over x is computed. No other file asks which platform a program is for.

All variants compute the formulas of `formulas`. The choice depends on the platform, on an
example's shape, and on which values share moments or a weight; not on the number of examples,
nor on whether y is differentiated. Units are bytes moved by those of x (docs/gpu.md).

| moments of | CPU | GPU | TPU |
| --- | --- | --- | --- |
| each example (rows, groups) | `Passes` in rows | `Chain` | `Passes` |
| ... longer than 16,384, masked, split | `Passes` in rows | `Passes` | `Passes` |
| ... training, longer than 32 | `Passes` in rows | `Passes` for gradients | `Passes` |
| each position (`axis=0`) | `Passes` in rows | `Passes` | `Passes` |
| a batch, given by a strategy | `Passes` in rows | `Passes` | `Passes` |
| `implementation="pallas"` | an error | `Kernel` | `Kernel` |

- `Chain`: XLA:GPU makes one kernel of it, which reads x once: y moves 2.0 units, by passes 4.0;
  the gradient of x 3.0, by passes 7.0. The kernel cannot return its sums, which gradients of
  weights need, so these take passes (9.1 units in training), but for rows of up to 32 values,
  where summing again is cheaper than a read. A mask, a longer row or a split row cuts the
  kernel.
- `Passes` in rows: XLA:CPU loops over an array's axes, and is slow in rows of 7 or 8 values.
- `Passes` elsewhere, in the caller's shape: 4.0 units for y of a batch and 9.0 in training, on
  a GPU and on a TPU. In another shape XLA:TPU copies x (2 passes more).
- `Kernel`: 5.3 units in training where XLA takes 9.1; not timed, so never chosen by itself.

How passes differ by platform is in `_PLATFORMS`, and each field in
`statistics_and_sums.Variant`.
"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from eqx_norm._jax.arithmetic import uncontracted
from eqx_norm._jax.lowering import Target
from eqx_norm._normalise.formulas import reference
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.reference import Shape
from eqx_norm._normalise.formulas.row_norm import Operands, Options, Sums
from eqx_norm._normalise.kernels import columns, rows

from . import on_cpu, on_gpu, statistics_and_sums
from .gpu_chain import Chain
from .statistics_and_sums import Variant
from .y_and_gradients import Passes

_PLATFORMS = {
    # Trees of sums: XLA's own loop along rows takes 4 times as long (`cpu_tree`).
    "cpu": Variant(
        is_flat=True,
        sums=on_cpu.tree_sums,
        statistics=on_cpu.statistics,
        squares=on_cpu.squares,
        small=on_cpu.converted,
        materialised=on_cpu.materialised,
        uncontracted=uncontracted,
        rsqrt=reference.rsqrt,
    ),
    # Two sums in one reduction: else XLA writes an activation's derivative first (`on_gpu`).
    "gpu": Variant(
        sums=on_gpu.packed_sums,
        statistic_sums=on_gpu.cut_sums,
        has_barriers=True,
        is_first_in_rows=True,
    ),
    "other": Variant(),
}


def variant_of(target: Target) -> Variant:
    """Returns what passes do on the platform. Sums that cut arrays into parts need sizes that
    are known, and arrays that XLA does not split."""
    of_platform = _PLATFORMS[target.platform]
    if target.is_known and not target.is_partitioned:
        return of_platform
    cut = ("sums", "statistics", "squares", "statistic_sums", "materialised")
    return of_platform._replace(**{name: Variant._field_defaults[name] for name in cut})


# --- Each function is the lowering of a primitive.


def statistics(
    target: Target,
    x: Array,
    *mask: Array,
    layout: Layout,
    shape: Shape,
    centred: bool,
    implementation: str,
) -> Sequence[Array]:
    """Computes `reference.statistics`; unless `centred`, count and sum of squares alone."""
    if centred and implementation == "pallas":
        arrays = map(layout.in_rows, (x, *mask))
        found = columns.statistics(target, *arrays, shape=layout.rows(shape))
        return statistics_and_sums.pooled(target, found)
    chosen = variant_of(target)
    found = statistics_and_sums.statistics(
        chosen, target, x, *mask, layout=layout, shape=shape, centred=centred
    )
    if not centred:
        return found
    if shape != layout.own_shape(x.shape):
        # Materialised for the passes over a batch, each of which reads them. Passes over rows
        # materialise rstd instead.
        count, *vectors = found
        found = [count, *chosen.materialised(*vectors)]
    return statistics_and_sums.pooled(target, found)


def sums(target: Target, *arrays: Array, **static: Any) -> Sequence[Array]:
    """Computes `reference.sums`."""
    return statistics_and_sums.sums(variant_of(target), target, *arrays, **static)


def affine(target: Target, *arrays: Array, **static: Any) -> list[Array]:
    """Computes `reference.affine`."""
    return statistics_and_sums.affine(variant_of(target), *arrays, **static)


def norm(
    target: Target,
    x: Array,
    weight: Array,
    bias: Array,
    *others: Array,
    layout: Layout,
    options: Options,
) -> list[Array]:
    """Returns the normalised x. `others` are the given moments, if any, after `x_upcast`, which
    is not read, and the mask, if any."""
    at = Operands.of(x, weight, bias, others[1:] if options.given else others)
    return [_of_norm(target, at, Sums(), layout, options).y(at).astype(options.dtype)]


def gradients(
    target: Target,
    dy: Array,
    x: Array,
    weight: Array,
    bias: Array,
    *others: Array,
    layout: Layout,
    options: Options,
    sums: Sums,
) -> list[Array]:
    """Returns the gradients of x, of weight and bias if they are wanted, and of variance and
    mean if they are. `others` are moments and mask."""
    at = Operands.of(x, weight, bias, others)
    of_norm = _of_norm(target, at, sums, layout, options)
    dx, *of_vectors = of_norm.gradients(dy, at, sums)
    return [dx.astype(sums.x_dtype), *of_vectors]


def _of_norm(
    target: Target, at: Operands, sums: Sums, layout: Layout, options: Options
) -> rows.Kernel | Chain | Passes:
    if options.kernel:
        found = rows.Kernel.of(target, layout, options.norm, at, sums)
        if found is not None:
            return found
    if target.platform == "gpu" and not options.given and not at.mask:
        chain = Chain(layout, options.norm)
        has_whole_rows = options.contiguous and not target.over[0]
        if has_whole_rows and chain.serves(at, sums):
            return chain
    return Passes(variant_of(target), target, layout, options)


def can_split(target: Target, mapped: Shape) -> bool:
    """Returns whether each device can compute a pass on its shard of x, whose mapped axes have
    these sizes."""
    # XLA:TPU finds no Python code that partitions a call (jax 0.12.0.1). Shards of different
    # sizes would be gathered.
    is_even = any(size % target.devices == 0 for size in mapped)
    return target.platform in ("cpu", "gpu") and is_even
