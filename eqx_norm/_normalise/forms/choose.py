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
from eqx_norm._normalise.formulas.row_norm import Operands, RowNorm, Sums
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


def rstd_and_mean(
    target: Target, x: Array, *mask: Array, layout: Layout, eps: float, centred: bool
) -> list[Array]:
    """Returns rstd of each group and, if `centred`, the mean as a pair."""
    return Passes(form(target), target, layout, RowNorm(eps, centred)).rstd_and_mean(x, mask)


def norm(
    target: Target,
    x: Array,
    weight: Array,
    bias: Array,
    *others: Array,
    given: bool,
    dtype: Any,
    **static: Any,
) -> list[Array]:
    """Returns the normalised x, of `dtype`. `others` are the given moments, if any, after
    `wide`, which is not read, and the mask, if any."""
    mask = [v for v in others if v.dtype == bool]
    at = Operands(x, weight, bias, mask, others[1:4] if given else (), given)
    return [_of_norm(target, at, Sums(), **static).y(at).astype(dtype)]


def gradients(
    target: Target,
    dy: Array,
    x: Array,
    weight: Array,
    bias: Array,
    *others: Array,
    given: bool,
    shape: Shape | None,
    moments_shape: Shape | None,
    wanted: tuple[bool, bool],
    dtype: Any,
    dx_dtype: Any,
    **static: Any,
) -> list[Array]:
    """Returns the gradients of x, of weight and bias, of `shape`, that are `wanted`, and those of
    rstd and mean, of `moments_shape` unless it is `None`. `others` are rstd, mean and mask."""
    del dtype
    mask = [v for v in others if v.dtype == bool]
    at = Operands(x, weight, bias, mask, others[: len(others) - len(mask)], given)
    sums = Sums(shape, *wanted, moments_shape)
    dx, *of_vectors = _of_norm(target, at, sums, **static).gradients(dy, at, sums)
    return [dx.astype(dx_dtype), *of_vectors]


def _of_norm(
    target: Target,
    at: Operands,
    sums: Sums,
    *,
    layout: Layout,
    norm: RowNorm,
    adjacent: bool,
    kernel: bool,
) -> rows.Kernel | Chain | Passes:
    if kernel:
        found = rows.Kernel.of(target, layout, norm, at, sums)
        if found is not None:
            return found
    if target.platform == "gpu" and not at.given and not at.mask:
        chain, has_whole_rows = Chain(layout, norm), adjacent and not target.over[0]
        if has_whole_rows and chain.serves(at, sums):
            return chain
    return Passes(form(target), target, layout, norm)
