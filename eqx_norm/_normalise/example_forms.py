"""Chooses the form of the norm of one example and of its gradients.

| | CPU | GPU | else |
| --- | --- | --- | --- |
| y | passes | a chain, or passes | passes |
| gradients | passes | a chain (of x alone, or in short rows), or passes | passes |
| `"pallas"`, both | an error | a kernel | a kernel on a TPU |

The choice depends on an example's shape and on what shares a weight, and not on the number of
examples, nor on whether y is differentiated.
"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array

from .chain import Chain
from .example_passes import Passes, moments
from .kernels import rows
from .layout import Layout
from .passes import Target
from .reference import Shape
from .row_norm import RowNorm


def y(
    target: Target, x: Array, weight: Array, bias: Array, *mask: Array, **static: Any
) -> list[Array]:
    """Returns the normalised x."""
    form = _form(target, x, weight, bias, *mask, **static)
    return [form.y(x, weight, bias, *mask)]


def gradients(
    target: Target,
    dy: Array,
    x: Array,
    weight: Array,
    bias: Array,
    *others: Array,
    shape: Shape,
    wanted: Sequence[bool],
    **static: Any,
) -> list[Array]:
    """Returns the gradient of x, and those of weight and bias, of `shape`, that are `wanted`.
    `others` are rstd, mean and mask."""
    vectors = [v for v in others if v.dtype != bool]
    arrays = x, weight, bias, *others[len(vectors) :]
    form = _form(target, *arrays, shape=shape, has_sums=any(wanted), **static)
    if isinstance(form, Passes) and not vectors:
        norm: RowNorm = static["norm"]
        how: Any = {"layout": static["layout"], "eps": norm.eps, "centred": norm.centred}
        vectors = moments(target, x, *arrays[3:], **how)
    return form.gradients(dy, *arrays, vectors=vectors, shape=shape, wanted=wanted)


def _form(
    target: Target,
    x: Array,
    weight: Array,
    bias: Array,
    *mask: Array,
    layout: Layout,
    norm: RowNorm,
    adjacent: bool,
    kernel: bool,
    shape: Shape = (),
    has_sums: bool = False,
) -> rows.Kernel | Chain | Passes:
    shapes = weight.shape, bias.shape, *[shape] * has_sums
    if kernel and (form := rows.Kernel.of(target, layout, norm, x, *shapes)):
        return form
    chain = Chain(layout, norm)
    whole = adjacent and not mask and not target.over[0]
    if target.platform == "gpu" and whole and chain.serves(x, *shapes, has_sums=has_sums):
        return chain
    return Passes.of(target, layout, norm, weight, bias)
