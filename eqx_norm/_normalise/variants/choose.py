"""Chooses how each pass over x is computed. Only this file and `kernels` ask for the platform.

All variants compute the formulas of `formulas`. The choice depends on the platform, on the
layout, shape, dtype, mask, activation and sharding of an example, and on the gradients wanted;
not on the number of examples, nor, for y, on whether y is differentiated. One unit is as many
bytes as x has (docs/gpu.md).

| moments of | CPU | GPU | TPU |
| --- | --- | --- | --- |
| each example (rows, groups) | `Passes` in rows | `Chain` | `Passes` |
| ... longer than 16,384, masked, split | `Passes` in rows | `Passes` | `Passes` |
| ... training, longer than 32 | `Passes` in rows | `Passes` for gradients | `Passes` |
| each position (`axis=0`) | `Passes` in rows | `Passes` | `Passes` |
| a batch, given by a strategy | `Passes` in rows | `Passes` | `Passes` |
| `implementation="pallas"` | an error | `Kernel` | `Kernel` |

- `Chain`: XLA:GPU makes one kernel of it, which reads x once: y moves 2.0 units, by passes 3.1;
  the gradient of x 3.0, by passes 6.1. The kernel cannot return its sums, which gradients of
  weights need, so these take passes (8.2 units in training), but for rows of up to 32 values,
  where summing again is cheaper than a read. A mask, a longer row or a split row cuts the
  kernel.
- `Passes` in rows: XLA:CPU loops over an array's axes, and is slow in rows of 7 or 8 values.
- `Passes` elsewhere, in the caller's shape: 3.1 units for y of a batch and 8.1 in training, on
  a GPU and on a TPU. In another shape XLA:TPU copies x (2 passes more).
- `Kernel`: 5.3 units in training where XLA takes 8.2; not timed, so never chosen by itself.

How passes differ by platform is in `_PLATFORMS`; `Variant` describes the fields.
"""

from collections.abc import Sequence

from jaxtyping import Array, Bool, Float, Shaped

from eqx_norm._jax.arithmetic import uncontracted
from eqx_norm._jax.lowering import Target
from eqx_norm._normalise.formulas import reference
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.reference import Shape
from eqx_norm._normalise.formulas.row_norm import Operands, Options, Wanted
from eqx_norm._normalise.kernels import columns, rows

from . import moments_passes, on_cpu, on_gpu
from .gpu_chain import Chain
from .variant import Variant
from .y_and_gradients import Passes

_DEFAULT = Variant()
_PLATFORMS = {
    # Trees of sums: XLA's own loop along rows takes 4 times as long (`cpu_tree`).
    "cpu": Variant(
        is_flat=True,
        gradients_reduction=on_cpu.tree_sums,
        statistics=on_cpu.statistics,
        squares=on_cpu.squares,
        convert_small=on_cpu.convert_small,
        materialised=on_cpu.materialised,
        uncontracted=uncontracted,
        rsqrt=reference.rsqrt,
    ),
    # Two sums in one reduction: else XLA writes an activation's derivative first (`on_gpu`).
    "gpu": Variant(
        gradients_reduction=on_gpu.packed_sums,
        statistics_reduction=on_gpu.cut_sums,
        has_barriers=True,
        is_first_in_rows=True,
    ),
    "other": _DEFAULT,
}


def platform_variant(target: Target) -> Variant:
    """Returns how passes differ on the target's platform."""
    variant = _PLATFORMS[target.platform]
    if target.is_known and not target.is_partitioned:
        return variant
    # Sums that cut arrays into parts need sizes that are known, and arrays that XLA does not
    # split.
    return variant._replace(
        gradients_reduction=_DEFAULT.gradients_reduction,
        statistics_reduction=_DEFAULT.statistics_reduction,
        statistics=_DEFAULT.statistics,
        squares=_DEFAULT.squares,
        materialised=_DEFAULT.materialised,
    )


# --- Each function is the lowering of a primitive.


def statistics(
    target: Target,
    x: Float[Array, "*x"],
    *mask: Bool[Array, "*#x"],
    layout: Layout,
    shape: Shape,
    centred: bool,
    implementation: str,
) -> Sequence[Float[Array, "..."]]:
    """Computes `reference.statistics`; unless `centred`, count and sum of squares alone."""
    if centred and implementation == "pallas":
        arrays = map(layout.in_rows, (x, *mask))
        found = columns.statistics(target, *arrays, shape=layout.rows(shape))
        return moments_passes.pooled(target, found)
    variant = platform_variant(target)
    found = moments_passes.statistics(
        variant, target, x, *mask, layout=layout, shape=shape, centred=centred
    )
    if not centred:
        return found
    if shape != layout.own_shape(x.shape):
        # Materialised for the passes over a batch, each of which reads them. Passes over rows
        # materialise rstd instead.
        count, *vectors = found
        found = [count, *variant.materialised(*vectors)]
    return moments_passes.pooled(target, found)


def dot_products(
    target: Target, *arrays: Shaped[Array, "..."], layout: Layout, shape: Shape, both: bool
) -> Sequence[Float[Array, "..."]]:
    """Computes `moments_passes.dot_products` in the platform's variant."""
    variant = platform_variant(target)
    return moments_passes.dot_products(
        variant, target, *arrays, layout=layout, shape=shape, both=both
    )


def affine(
    target: Target, *arrays: Shaped[Array, "..."], layout: Layout
) -> list[Float[Array, "..."]]:
    """Computes `moments_passes.affine` in the platform's variant."""
    bias, scale, _x_upcast, *others = arrays
    return moments_passes.affine(platform_variant(target), bias, scale, *others, layout=layout)


def norm(
    target: Target,
    x: Float[Array, "*x"],
    weight: Float[Array, "*#x"],
    bias: Float[Array, "*#x"],
    *others: Shaped[Array, "..."],
    layout: Layout,
    options: Options,
) -> list[Float[Array, "..."]]:
    """Returns the normalised x. `others` are the given moments, if any, after `x_upcast`, which
    is not read, and the mask, if any."""
    if options.given:
        others = others[1:]
    operands = Operands.of(x, weight, bias, others)
    method = _method_of_norm(target, operands, Wanted(), layout, options)
    return [method.y(operands).astype(options.dtype)]


def gradients(
    target: Target,
    dy: Float[Array, "*x"],
    x: Float[Array, "*x"],
    weight: Float[Array, "*#x"],
    bias: Float[Array, "*#x"],
    *others: Shaped[Array, "..."],
    layout: Layout,
    options: Options,
    wanted: Wanted,
) -> list[Float[Array, "..."]]:
    """Returns the gradient of x and those that are wanted, of weight and bias, and of variance
    and mean. `others` are moments and mask."""
    operands = Operands.of(x, weight, bias, others)
    method = _method_of_norm(target, operands, wanted, layout, options)
    dx, *of_vectors = method.gradients(dy, operands, wanted)
    return [dx.astype(wanted.x_dtype), *of_vectors]


def _method_of_norm(
    target: Target, operands: Operands, wanted: Wanted, layout: Layout, options: Options
) -> rows.Kernel | Chain | Passes:
    if options.kernel:
        kernel = rows.Kernel.of(target, layout, options.norm, operands, wanted)
        if kernel is not None:
            return kernel
    if target.platform == "gpu" and not options.given and not operands.mask:
        chain = Chain(layout, options.norm)
        has_whole_rows = options.contiguous and not target.over[0]
        if has_whole_rows and chain.serves(operands, wanted):
            return chain
    return Passes(platform_variant(target), target, layout, options)


def can_split(target: Target, mapped: Shape) -> bool:
    """Returns whether each device can compute a pass on its shard of x, whose mapped axes have
    these sizes."""
    # XLA:TPU finds no Python code that partitions a call (jax 0.12.0.1). Shards of different
    # sizes would be gathered.
    is_even = any(size % target.devices == 0 for size in mapped)
    return target.platform in ("cpu", "gpu") and is_even
