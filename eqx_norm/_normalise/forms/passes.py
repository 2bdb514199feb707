"""Computes the norm of one example and its gradients by passes over x.

The formulas are those of `row_norm`, for any layout, mask, dtype, and for weights of each
example. y and the gradient of x depend on an example alone: on a CPU, sums are in an order
given by the example's shape.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from eqx_norm._jax.lowering import Target
from eqx_norm._normalise.formulas import reference
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.reference import Shape
from eqx_norm._normalise.formulas.row_norm import Operands, RowNorm, Sums
from eqx_norm.strategies._pair import rounded

from . import choice, on_cpu


def rstd_and_mean(
    target: Target, x: Array, *mask: Array, layout: Layout, eps: float, centred: bool
) -> list[Array]:
    """Returns rstd of each group and, if `centred`, the mean as a pair."""
    shape = (*x.shape[: x.ndim - layout.ndim], *layout.moments_shape)
    how: Any = {"blocks": layout.moment_blocks, "shape": shape}
    on_a_cpu = target.own_sums == "cpu"
    if centred:
        how |= {"implementation": "auto", "written": False}
        found = choice.statistics(target, x, *mask, **how)
        count, mean, m2, rest = (v.reshape(shape) for v in found)
        vectors = [mean, rest]
    else:
        if on_a_cpu and layout.groups and not mask and layout.length <= on_cpu.UNCUT:
            m2 = on_cpu.squares(x.reshape(layout.rows(x.shape)))
            (m2,) = choice.summed_over([m2], target.over[0])
        else:
            zero = jnp.zeros((1,) * x.ndim, reference.compute_dtype(x.dtype))
            arrays = reference.widened(_small(target, x)), x, zero, zero, *mask
            (m2,) = choice.sums(target, *arrays, both=False, **how)
        m2, vectors, count = m2.reshape(shape), [], None
    if count is None or not mask:  # a constant
        count = _count(target, layout, x, mask, shape)
    n = jnp.maximum(count, 1) if mask else count
    rstd = reference.rsqrt(m2 / n + eps)
    found = [rstd, *vectors]
    return [*on_cpu.written(*found)] if centred and on_a_cpu else found


def _small(target: Target, x: Array, *, once: bool = False) -> Array:
    return on_cpu.converted(x, once=once) if target.platform == "cpu" else x


def _count(
    target: Target, layout: Layout, x: Array, mask: Sequence[Array], shape: Shape
) -> Array:
    """Returns the number of values in each group, for x and mask in a shape with an axis for
    the groups, if there are several."""
    dtype, over = reference.compute_dtype(x.dtype), target.over[0]
    if not mask:
        devices = lax.axis_size(over) if over else 1
        return jnp.full((1,) * x.ndim, layout.length * devices, dtype)
    axes = reference.summed_axes(x.shape, shape)
    count = reference.counts(x.astype(dtype), mask[0], axes)
    return choice.summed_over([count], over)[0]


class Passes(NamedTuple):
    """Computes y and gradients in a shape that suits the platform. On a CPU it is `(*mapped,
    groups, values)`, with the values cut into those of each weight; else the caller's shape,
    with the channels cut into groups."""

    target: Target
    layout: Layout
    norm: RowNorm

    def y(self, at: Operands) -> Array:
        """Returns the normalised x."""
        x, vectors, arranged = at.x, at.moments, self._arrangement(at)
        if not at.given:
            # The squares of RMSNorm are read by XLA's library, which converts x itself.
            x = _small(self.target, x, once=not self.norm.centred)
            vectors = self._rstd_and_mean(at)
        x, *mask = arranged(x, *at.mask)
        rstd, *mean = arranged(*vectors)
        weight, bias = arranged(at.weight, at.bias)
        d = _deviations(x, rstd, mean, mask)
        return reference.masked(self.norm.y(d, rstd * weight, bias), *mask)

    def gradients(self, dy: Array, at: Operands, sums: Sums) -> list[Array]:
        """Returns the gradients of x, weights and given moments, as `choice_for_examples.gradients`
        does."""
        target, layout, norm = self
        arranged, x = self._arrangement(at), at.x
        if at.given:
            vectors, moments_shape = at.moments, sums.moments_shape or at.moments[0].shape
        else:
            x, dy = _small(target, x), _small(target, dy)
            vectors = at.moments or self._rstd_and_mean(at)
            moments_shape = (*x.shape[: x.ndim - layout.ndim], *layout.moments_shape)
        moments_shape = arranged.shape(moments_shape)
        weights_shape = arranged.shape(at.weight.shape if sums.shape is None else sums.shape)
        x, dy, weight, bias, *mask = arranged(x, dy, at.weight, at.bias, *at.mask)
        vectors, passes = arranged(*vectors), itertools.count(1)
        # A row's own bits: see `_rounded_product`.
        product = _rounded_product if self._is_on_cpu and not at.given else lax.mul

        def each_pass() -> tuple[Array, Array, Array]:
            """Returns g, x - mean and rstd, for another pass over x."""
            own = vectors
            # Without barriers XLA:GPU would store x - mean and the activation's derivative.
            barriers = next(passes) if norm.activation else 1
            for _ in range(barriers if target.platform == "gpu" else 0):
                own = [*map(lax.optimization_barrier, own)]
            rstd, *mean = own
            d = _deviations(x, rstd, mean, mask)
            g = norm.g(dy.astype(d.dtype), d * rstd, weight, bias, product)
            return reference.masked(g, *mask), d, rstd

        g, d, rstd = each_pass()
        sizes = [*enumerate(zip(moments_shape, weights_shape, x.shape, strict=True))]
        inner = [i for i, (m, w, n) in sizes if m == w == 1 != n]  # values that share a weight
        outer = [i for i, (m, w, _) in sizes if m == 1 != w]  # weights that share moments
        parts = self._sums([g * d, *[g] * (norm.centred or sums.of_bias)], inner)
        weighted = [weight * part for part in parts[: 1 + norm.centred]]
        totals = choice.summed_over(self._sums(weighted, outer), target.over[0])
        if inner or outer:
            g, d, rstd = each_pass()
        if at.given:
            dx, of_moments = rstd * weight * g, [totals[0], -rstd * totals[1]]
        else:
            dx, of_moments = self._dx(g, d, rstd, weight, totals, mask, moments_shape), []
        dx = reference.masked(dx, *mask)
        if sums.moments_shape is None:
            of_moments = []
        if not sums.any:
            return [dx, *of_moments]
        if not inner:
            g, d, rstd = each_pass()
            parts = [g * d, g]
        arrays = sums.chosen(parts[0] * rstd, parts[-1])
        arrays = self._sums(arrays, reference.summed_axes(arrays[0].shape, weights_shape))
        return [dx, *choice.summed_over(arrays, target.over[-1]), *of_moments]

    def _dx(
        self,
        g: Array,
        d: Array,
        rstd: Array,
        weight: Array,
        totals: Sequence[Array],
        mask: Sequence[Array],
        moments_shape: Shape,
    ) -> Array:
        """Returns dx through y and through x's own moments."""
        count = _count(self.target, self.layout, g, mask, moments_shape)
        n = jnp.maximum(count, 1)
        is_broadcast = isinstance(g.size, int) and weight.size < g.size
        if self._is_on_cpu and not is_broadcast:
            # A weight of its own: XLA writes the product of arrays of one size, here the weight
            # and g, if two loops read it. LLVM could then not contract it with the subtraction.
            weight = rounded(weight)
        h = weight * g - (totals[1] / n if self.norm.centred else 0)
        return rstd * (h - d * (rstd * rstd * (totals[0] / n)))

    def _rstd_and_mean(self, at: Operands) -> list[Array]:
        how: Any = {"layout": self.layout, "eps": self.norm.eps, "centred": self.norm.centred}
        return rstd_and_mean(self.target, at.x, *at.mask, **how)

    def _arrangement(self, at: Operands) -> "_Arrangement":
        weights = (math.prod(w.shape[w.ndim - self.layout.ndim :]) for w in at[1:3])
        per_value = max(weights) == math.prod(self.layout.shape)
        return _Arrangement(self.layout, self.target.own_sums == "cpu", per_value)

    @property
    def _is_on_cpu(self) -> bool:
        return self.target.platform == "cpu"

    def _sums(self, arrays: Sequence[Array], axes: Sequence[int]) -> Sequence[Array]:
        return choice.reduction(self.target)(arrays, axes) if axes else arrays


class _Arrangement(NamedTuple):
    """Reshapes arrays of the caller's shape: x, masks, weights and moments."""

    layout: Layout
    is_flat: bool
    per_value: bool  # each value has a weight

    def __call__(self, *arrays: Array) -> list[Array]:
        layout = self.layout

        def reshaped(array: Array) -> Array:
            if array.dtype == bool and self.is_flat and layout.groups is not None:
                mapped = array.shape[: array.ndim - layout.ndim]
                array = jnp.broadcast_to(array, (*mapped, *layout.shape))
            return array.reshape(self.shape(array.shape))

        return [*map(reshaped, arrays)]

    def shape(self, shape: Shape) -> Shape:
        """Returns the shape for an array of this shape."""
        layout, blocks = self.layout, self.layout.moment_blocks
        if layout.groups is None:
            return blocks.flat(shape) if self.is_flat else shape
        if not self.is_flat:
            mapped = shape[: len(shape) - layout.ndim]
            return blocks.cut(shape, (*mapped, *layout.shape))
        rows, weights = layout.rows(shape), layout.channels // layout.groups
        # XLA:CPU loops over each axis.
        if weights <= 1 or self.per_value:
            return rows
        if rows[-1] == 1:
            return (*rows, 1)
        return (*rows[:-1], weights, rows[-1] // weights)


def _rounded_product(a: Any, b: Any) -> Array:
    """Returns a * b. LLVM contracts one of two products and their sum into one operation, which
    rounds once: without the rounding it depends on the loop's other operations which one."""
    return rounded(a * b)


def _deviations(x: Array, rstd: Array, mean: Sequence[Array], mask: Sequence[Array]) -> Array:
    """Returns x - mean in the dtype of rstd, x itself if there is no mean."""
    d = reference.centred(x, *mean) if mean else x.astype(rstd.dtype)
    return reference.masked(d, *mask)
