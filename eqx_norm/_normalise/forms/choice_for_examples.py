"""Chooses the form of the norm of one example and of its gradients.

| | CPU | GPU | else |
| --- | --- | --- | --- |
| y | passes | a chain, or passes | passes |
| gradients | passes | a chain (of x alone, or in short rows), or passes | passes |
| `"pallas"`, both | an error | a kernel | a kernel on a TPU |

The choice depends on an example's shape and on what shares a weight, and not on the number of
examples, nor on whether y is differentiated.
"""

from typing import Any

from jaxtyping import Array

from eqx_norm._jax.lowering import Target
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.reference import Shape
from eqx_norm._normalise.formulas.row_norm import Operands, RowNorm, Sums
from eqx_norm._normalise.kernels import rows

from .gpu_chain import Chain
from .passes import Passes


def y(
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
    return [_form(target, at, Sums(), **static).y(at).astype(dtype)]


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
    dx, *of_vectors = _form(target, at, sums, **static).gradients(dy, at, sums)
    return [dx.astype(dx_dtype), *of_vectors]


def _form(
    target: Target,
    at: Operands,
    sums: Sums,
    *,
    layout: Layout,
    norm: RowNorm,
    adjacent: bool,
    kernel: bool,
) -> rows.Kernel | Chain | Passes:
    if kernel and (form := rows.Kernel.of(target, layout, norm, at, sums)):
        return form
    chain, has_rows = Chain(layout, norm), adjacent and not at.mask and not target.over[0]
    if target.platform == "gpu" and has_rows and not at.given and chain.serves(at, sums):
        return chain
    return Passes(target, layout, norm)
