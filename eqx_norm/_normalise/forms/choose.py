"""Chooses how each pass over x is computed, by platform and layout: no other file asks which
platform a program is for. All forms compute the formulas of `formulas`.

| | CPU | GPU | else |
| --- | --- | --- | --- |
| y, by x's own moments | passes | a chain, or passes | passes |
| gradients of that | passes | a chain (of x alone, or in short rows), or passes | passes |
| y and gradients, by given moments | passes | passes | passes |
| `"pallas"` | an error | a kernel | a kernel on a TPU |
| passes: see `Form` | `on_cpu` | `on_gpu` | XLA's own sums |

The choice depends on an example's shape and on what shares a weight, and not on the number of
examples, nor on whether y is differentiated.
"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from eqx_norm._jax.lowering import Target
from eqx_norm._normalise.formulas import reference
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.reference import Shape
from eqx_norm._normalise.formulas.row_norm import Operands, Options, Sums
from eqx_norm._normalise.kernels import columns, rows
from eqx_norm.strategies._pair import rounded

from . import on_cpu, on_gpu, sums_of_x
from .gpu_chain import Chain
from .passes import Passes
from .sums_of_x import Form

_PLATFORMS = {
    "cpu": Form(
        is_flat=True,
        sums=on_cpu.tree_sums,
        statistics=on_cpu.statistics,
        squares=on_cpu.squares,
        small=on_cpu.converted,
        written=on_cpu.written,
        uncontracted=rounded,
        rsqrt=reference.rsqrt,
    ),
    "gpu": Form(
        sums=on_gpu.packed_sums,
        statistic_sums=on_gpu.cut_sums,
        has_barriers=True,
        is_first_in_rows=True,
    ),
    "other": Form(),
}


def form(target: Target) -> Form:
    """Returns what passes do on the platform. Sums that cut arrays into parts need sizes that
    are known, and arrays that XLA does not split."""
    of_platform = _PLATFORMS[target.platform]
    if target.is_known and not target.is_partitioned:
        return of_platform
    cut = ("is_flat", "sums", "statistics", "squares", "statistic_sums", "written")
    return of_platform._replace(**{name: Form._field_defaults[name] for name in cut})


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
        return sums_of_x.pooled(target, found)
    chosen = form(target)
    found = sums_of_x.statistics(
        chosen, target, x, *mask, layout=layout, shape=shape, centred=centred
    )
    if not centred:
        return found
    # Written to memory, for passes that read them several times.
    count, *vectors = found
    return sums_of_x.pooled(target, [count, *chosen.written(*vectors)])


def sums(target: Target, *arrays: Array, **static: Any) -> Sequence[Array]:
    """Computes `reference.sums`."""
    return sums_of_x.sums(form(target), target, *arrays, **static)


def affine(target: Target, *arrays: Array, **static: Any) -> list[Array]:
    """Computes `reference.affine`."""
    return sums_of_x.affine(form(target), *arrays, **static)


def norm(
    target: Target,
    x: Array,
    weight: Array,
    bias: Array,
    *others: Array,
    layout: Layout,
    options: Options,
) -> list[Array]:
    """Returns the normalised x. `others` are the given moments, if any, after `wide`, which is
    not read, and the mask, if any."""
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
    return Passes(form(target), target, layout, options)


def can_split(target: Target, mapped: Shape) -> bool:
    """Returns whether each device can compute a pass on its shard of x, whose mapped axes have
    these sizes."""
    # XLA:TPU finds no Python code that partitions a call (jax 0.12.0.1). Shards of different
    # sizes would be gathered.
    is_even = any(size % target.devices == 0 for size in mapped)
    return target.platform in ("cpu", "gpu") and is_even
