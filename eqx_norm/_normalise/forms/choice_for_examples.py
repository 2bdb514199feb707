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

from .example_passes import Passes
from .gpu_chain import Chain


def y(
    target: Target, x: Array, weight: Array, bias: Array, *mask: Array, **static: Any
) -> list[Array]:
    """Returns the normalised x."""
    at = Operands(x, weight, bias, mask)
    return [_form(target, at, Sums(), **static).y(at)]


def gradients(
    target: Target,
    dy: Array,
    x: Array,
    weight: Array,
    bias: Array,
    *others: Array,
    shape: Shape,
    wanted: tuple[bool, bool],
    **static: Any,
) -> list[Array]:
    """Returns the gradient of x, and those of weight and bias, of `shape`, that are `wanted`.
    `others` are rstd, mean and mask."""
    vectors = [v for v in others if v.dtype != bool]
    at, sums = Operands(x, weight, bias, others[len(vectors) :]), Sums(shape, *wanted)
    return _form(target, at, sums, **static).gradients(dy, at, vectors, sums)


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
    if target.platform == "gpu" and has_rows and chain.serves(at, sums):
        return chain
    return Passes(target, layout, norm)
