"""Computes the norm of one example and its gradients by passes over x.

The formulas are those of `row_norm`, for any layout, mask, dtype, and for weights of each
example. y and the gradient of x depend on an example alone: on a CPU, sums are in an order
given by the example's shape.
"""

import functools
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
from eqx_norm._normalise.formulas.row_norm import Operands, Options, Product, Sums

from . import statistics_and_sums
from .statistics_and_sums import Variant

# In shorter rows LLVM unrolls the loop along a row, and vectorises the loop over rows. With
# AVX-512 it then contracts products and sums in the remainder alone (jax 0.12.0.1, also
# 0.10.2).
SHORT = 8


class Passes(NamedTuple):
    """Computes y and gradients in a shape that suits the platform. On a CPU it is `(*mapped,
    groups, values)`, with the values cut into those of each weight; else the caller's shape,
    with the channels cut into groups."""

    variant: Variant
    target: Target
    layout: Layout
    options: Options

    def y(self, at: Operands) -> Array:
        """Returns the normalised x."""
        x, norm, arranged = at.x, self.options.norm, functools.partial(self._arranged, at)
        if not at.moments:
            # The squares of RMSNorm are read by XLA's library, which converts x itself.
            x = self.variant.small(x, once=not norm.centred)
        rstd, *mean = arranged(*self._rstd_and_mean(at))
        x, *mask = arranged(x, *at.mask)
        weight, bias = arranged(at.weight, at.bias)
        d = _deviations(x, rstd, mean, mask)
        return reference.masked(norm.y(d, rstd * weight, bias, self._product), *mask)

    def gradients(self, dy: Array, at: Operands, sums: Sums) -> list[Array]:
        """Returns the gradients of x, weights and given moments, as `choose.gradients` does."""
        variant, target, norm = self.variant, self.target, self.options.norm
        given = self.options.given
        arranged, x = functools.partial(self._arranged, at), at.x
        moments_shape = self.layout.own_shape(x.shape)
        if given:
            moments_shape = sums.moments_shape or at.moments[0].shape
        else:
            x, dy = variant.small(x), variant.small(dy)
        moments_shape = self._shape(at, moments_shape)
        weights_shape = self._shape(at, at.weight.shape if sums.shape is None else sums.shape)
        vectors = arranged(*self._rstd_and_mean(at))
        x, dy, weight, bias, *mask = arranged(x, dy, at.weight, at.bias, *at.mask)
        passes, product = itertools.count(1), self._product
        of_derivative = lax.mul if given else self._uncontracted

        # Outside of the passes: a kernel of XLA:GPU less, unless the weight is as large as x.
        scales = [vectors[0] * weight] if given and weight.shape != x.shape else []

        def each_pass() -> tuple[Array, Array, Array]:
            """Returns g, x - mean and rstd, for another pass over x."""
            own = [*vectors, *scales]
            # Without barriers XLA:GPU would store x - mean and the activation's derivative.
            barriers = next(passes) if norm.activation else 1
            for _ in range(barriers if variant.has_barriers else 0):
                own = [*map(lax.optimization_barrier, own)]
            rstd, *mean = own[: len(vectors)]
            d = _deviations(x, rstd, mean, mask)
            if not given:
                u, scale = d * rstd, weight
            else:
                u, scale = d, own[-1] if scales else rstd * weight
            g = norm.g(dy.astype(d.dtype), u, scale, bias, product, of_derivative)
            return reference.masked(g, *mask), d, rstd

        g, d, rstd = each_pass()
        sizes = [*enumerate(zip(moments_shape, weights_shape, x.shape, strict=True))]
        inner = [i for i, (m, w, n) in sizes if m == w == 1 != n]  # values that share a weight
        outer = [i for i, (m, w, _) in sizes if m == 1 != w]  # weights that share moments
        needs_sum_of_g = norm.centred or sums.of_bias
        gd = product(g, d)
        parts = self._sums([gd, g] if needs_sum_of_g else [gd], inner)
        weighted = [product(weight, part) for part in (parts if norm.centred else parts[:1])]
        totals = statistics_and_sums.summed_over(self._sums(weighted, outer), target.over[0])
        if inner or outer:
            g, d, rstd = each_pass()
        of_moments = []
        if not given:
            dx = self._dx(g, d, rstd, weight, totals, mask, moments_shape)
        else:
            dx = rstd * weight * g
            if sums.moments_shape is not None:
                of_moments = [
                    reference.r_cubed(vectors[0], -0.5 * totals[0]),
                    -rstd * totals[1],
                ]
        dx = reference.masked(dx, *mask)
        if sums.shape is None:
            return [dx, *of_moments]
        if not inner:
            g, d, rstd = each_pass()
            parts = [g * d, g]
        arrays = sums.chosen(parts[0] * rstd, parts[-1])
        arrays = self._sums(arrays, reference.summed_axes(arrays[0].shape, weights_shape))
        return [dx, *statistics_and_sums.summed_over(arrays, target.over[-1]), *of_moments]

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
        n = jnp.maximum(statistics_and_sums.count(self.target, g, mask, moments_shape), 1)
        is_broadcast = isinstance(g.size, int) and weight.size < g.size
        if not is_broadcast:
            # A weight of its own: XLA writes the product of arrays of one size, here the weight
            # and g, if two loops read it. LLVM could then not contract it with the subtraction.
            weight = self.variant.uncontracted(weight)
        # The sum of one unmasked value is the rounded product: dx of this value is exactly 0.
        centred = self.options.norm.centred
        product = self._uncontracted if centred and mask else self._product
        h = product(weight, g) - (totals[1] / n if centred else 0)
        return rstd * (h - self._product(d, rstd * rstd * (totals[0] / n)))

    def _rstd_and_mean(self, at: Operands) -> list[Array]:
        """Returns rstd and, if there is one, the mean as a pair."""
        variance, *mean = at.moments or self._own_moments(at)
        rstd = self._rstd(variance)
        if self.options.given or not self.options.norm.centred:
            return [rstd, *mean]
        return [*self.variant.materialised(rstd, *mean)]

    def _own_moments(self, at: Operands) -> list[Array]:
        """Returns the variance of x itself and, if `centred`, the mean as a pair."""
        centred, shape = self.options.norm.centred, self.layout.own_shape(at.x.shape)
        found = statistics_and_sums.statistics(
            self.variant,
            self.target,
            at.x,
            *at.mask,
            layout=self.layout,
            shape=shape,
            centred=centred,
        )
        if centred:
            found = statistics_and_sums.pooled(self.target, found)
        count, *found = (v.reshape(shape) for v in found)
        if at.mask:
            n = jnp.maximum(count, 1)
        else:  # a constant
            over = self.target.over[0]
            devices = lax.axis_size(over) if over else 1
            n = jnp.full((1,) * at.x.ndim, self.layout.length * devices, count.dtype)
        if not centred:
            return [found[0] / n]
        mean, m2, rest = found
        return [m2 / n, mean, rest]

    @property
    def _product(self) -> Product:
        """Returns the function of products that are added to something."""
        length = self.layout.length
        is_short = isinstance(length, int) and length < SHORT and not self.options.given
        return self._uncontracted if is_short else lax.mul

    def _uncontracted(self, a: Any, b: Any) -> Array:
        """Returns a * b, which LLVM cannot contract with a sum into one operation, which rounds
        once. Of two products it depends on the loop's other operations which one is contracted,
        and a row must have its own bits."""
        return self.variant.uncontracted(lax.mul(a, b))

    def _rstd(self, variance: Array) -> Array:
        # XLA multiplies m2 by the rounded 1/n, and LLVM would contract the product with the sum
        # in some loops: a row would have two rstd.
        return self.variant.rsqrt(self.variant.uncontracted(variance) + self.options.norm.eps)

    def _arranged(self, at: Operands, *arrays: Array) -> list[Array]:
        return self.variant.arranged(self.layout, *arrays, by_channel=self._by_channel(at))

    def _shape(self, at: Operands, shape: Shape) -> Shape:
        return self.variant.shape(self.layout, shape, by_channel=self._by_channel(at))

    def _by_channel(self, at: Operands) -> bool:
        """Returns whether weights are of channels, and not of each value."""
        sizes = [math.prod(w.shape[w.ndim - self.layout.ndim :]) for w in (at.weight, at.bias)]
        return math.prod(self.layout.shape) not in sizes

    def _sums(self, arrays: Sequence[Array], axes: Sequence[int]) -> Sequence[Array]:
        return self.variant.reduced(arrays, axes) if axes else arrays


def _deviations(x: Array, rstd: Array, mean: Sequence[Array], mask: Sequence[Array]) -> Array:
    """Returns x - mean in the dtype of rstd, x itself if there is no mean."""
    d = reference.centred(x, *mean) if mean else x.astype(rstd.dtype)
    return reference.masked(d, *mask)
