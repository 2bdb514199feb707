"""Computes y and its gradients by passes over x.

The formulas are those of `row_norm`, for any layout, mask and dtype, for moments that are given
or x's own, and for weights that differ between examples. With x's own moments, y and the
gradient of x depend on an example alone: on a CPU, sums are in an order given by the example's
shape.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Shaped

from eqx_norm._jax.lowering import Target
from eqx_norm._normalise.formulas import reference
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.reference import Shape
from eqx_norm._normalise.formulas.row_norm import Operands, Options, Product, Wanted

from . import moments_passes
from .variant import Variant

# In shorter rows LLVM unrolls the loop along a row, and vectorises the loop over rows. With
# AVX-512 it then contracts products and sums in the remainder alone (jax 0.12.0.1, also
# 0.10.2).
SHORT = 8


class _Read(NamedTuple):
    """Holds what each pass of `Passes.gradients` reads, arranged for the variant.

    **Fields:** `mask`: one mask or none; `vectors`: rstd and, if there is one, mean and
    mean_lo; `scales`: rstd * weight or none.
    """

    x: Float[Array, "*x"]
    dy: Float[Array, "*x"]
    weight: Float[Array, "*#x"]
    bias: Float[Array, "*#x"]
    mask: Sequence[Bool[Array, "*#x"]]
    vectors: Sequence[Float[Array, "*#x"]]
    scales: Sequence[Float[Array, "*#x"]]


class Passes(NamedTuple):
    """Computes y and gradients in a shape that suits the platform. On a CPU it is `(*mapped,
    groups, values)`, with the values cut into those of each weight; else the caller's shape,
    with the channels cut into groups."""

    variant: Variant
    target: Target
    layout: Layout
    options: Options

    def y(self, operands: Operands) -> Float[Array, "..."]:
        """Returns the normalised x."""
        x, norm = operands.x, self.options.norm
        if not self.options.given:
            # The squares of RMSNorm are read by XLA's library, which converts x itself.
            x = self.variant.convert_small(x, is_read_once=not norm.centred)
        arranged = functools.partial(self._arranged, operands)
        rstd, *mean = arranged(*self._rstd_and_mean(operands))
        x, *mask = arranged(x, *operands.mask)
        weight, bias = arranged(operands.weight, operands.bias)
        d = _deviations(x, rstd, mean, mask)
        y = norm.y(d, rstd * weight, bias, self._product)
        return reference.masked(y, *mask)

    def gradients(
        self, dy: Float[Array, "*x"], operands: Operands, wanted: Wanted
    ) -> list[Float[Array, "..."]]:
        """Returns the gradients of x, weights and given moments, as `choose.gradients` does."""
        norm, given = self.options.norm, self.options.given
        over_moments, over_weights = self.target.over[0], self.target.over[-1]
        moments_shape, weights_shape = self._gradient_shapes(operands, wanted)
        x = operands.x
        if not given:
            x, dy = self.variant.convert_small(x), self.variant.convert_small(dy)
        vectors = self._arranged(operands, *self._rstd_and_mean(operands))
        x, dy, weight, bias, *mask = self._arranged(
            operands, x, dy, operands.weight, operands.bias, *operands.mask
        )
        # Outside of the passes: a kernel of XLA:GPU less, unless the weight is as large as x.
        scales = [vectors[0] * weight] if given and weight.shape != x.shape else []
        read = _Read(x, dy, weight, bias, mask, vectors, scales)
        passes, product = itertools.count(1), self._product
        g, d, rstd = self._terms(read, next(passes))
        sizes = [*enumerate(zip(moments_shape, weights_shape, x.shape, strict=True))]
        inner = [i for i, (m, w, n) in sizes if m == w == 1 != n]  # values that share a weight
        outer = [i for i, (m, w, _) in sizes if m == 1 != w]  # weights that share moments
        gd = product(g, d)
        needs_sum_of_g = norm.centred or wanted.bias
        parts = self._sums([gd, g] if needs_sum_of_g else [gd], inner)
        # Of weight * g * d and, unless the mean counts as 0, of weight * g.
        weighted = [product(weight, part) for part in (parts if norm.centred else parts[:1])]
        totals = moments_passes.summed_over(self._sums(weighted, outer), over_moments)
        if inner or outer:
            g, d, rstd = self._terms(read, next(passes))
        of_moments = []
        if not given:
            dx = self._dx(g, d, rstd, weight, totals, mask, moments_shape)
        else:
            dx = rstd * weight * g
            if wanted.moments_shape is not None:
                of_variance = reference.r_cubed(vectors[0], -0.5 * totals[0])
                of_moments = [of_variance, -rstd * totals[1]]
        dx = reference.masked(dx, *mask)
        if wanted.shape is None:
            return [dx, *of_moments]
        if not inner:
            g, d, rstd = self._terms(read, next(passes))
            parts = [g * d, g]
        arrays = wanted.chosen(parts[0] * rstd, parts[-1])
        arrays = self._sums(arrays, reference.summed_axes(arrays[0].shape, weights_shape))
        return [dx, *moments_passes.summed_over(arrays, over_weights), *of_moments]

    def _gradient_shapes(self, operands: Operands, wanted: Wanted) -> tuple[Shape, Shape]:
        """Returns the shapes of the moments' and the weights' gradients, in the variant's
        arrangement of axes."""
        moments_shape = self.layout.own_shape(operands.x.shape)
        if wanted.moments_shape is not None:
            moments_shape = wanted.moments_shape
        elif self.options.given:
            moments_shape = operands.moments[0].shape
        weights_shape = operands.weight.shape if wanted.shape is None else wanted.shape
        return self._shape(operands, moments_shape), self._shape(operands, weights_shape)

    def _terms(
        self, read: _Read, number: int
    ) -> tuple[Float[Array, "*x"], Float[Array, "*x"], Float[Array, "*#x"]]:
        """Returns g, x - mean and rstd, for the pass over x with this number."""
        norm, given = self.options.norm, self.options.given
        own = [*read.vectors, *read.scales]
        if self.variant.has_barriers:
            # XLA:GPU merges equal expressions (https://github.com/jax-ml/jax/issues/13999) and
            # would store x - mean and the activation's derivative: BatchNorm with GELU moves
            # 7 units more (jax 0.12.0.1). Barriers of equal depth merge as well (3 more), so
            # each pass has one more. Without them tests/operation/test_on_gpu.py,
            # `barriers_between_passes`, fails.
            for _ in range(number if norm.activation else 1):
                own = [*map(lax.optimization_barrier, own)]
        rstd, *mean = own[: len(read.vectors)]
        d = _deviations(read.x, rstd, mean, read.mask)
        if not given:
            u, scale = d * rstd, read.weight
        elif read.scales:
            u, scale = d, own[-1]
        else:
            u, scale = d, rstd * read.weight
        derivative_product = lax.mul if given else self._uncontracted
        dy = read.dy.astype(d.dtype)
        g = norm.g(dy, u, scale, read.bias, self._product, derivative_product)
        return reference.masked(g, *read.mask), d, rstd

    def _dx(
        self,
        g: Float[Array, "*x"],
        d: Float[Array, "*x"],
        rstd: Float[Array, "*#x"],
        weight: Float[Array, "*#x"],
        totals: Sequence[Float[Array, "*#x"]],
        mask: Sequence[Bool[Array, "*#x"]],
        moments_shape: Shape,
    ) -> Float[Array, "*x"]:
        """Returns dx through y and through x's own moments."""
        centred = self.options.norm.centred
        n = jnp.maximum(moments_passes.count(self.target, g, mask, moments_shape), 1)
        is_broadcast = isinstance(g.size, int) and weight.size < g.size
        if not is_broadcast:
            # A weight of its own: XLA writes the product of arrays of one size, here the weight
            # and g, if two loops read it. LLVM could then not contract it with the subtraction.
            weight = self.variant.uncontracted(weight)
        if not centred:
            h = self._product(weight, g)
        elif mask:
            # The sum of one unmasked value is the rounded product: dx of this value is exactly
            # 0.
            h = self._uncontracted(weight, g) - totals[1] / n
        else:
            h = self._product(weight, g) - totals[1] / n
        return rstd * (h - self._product(d, rstd * rstd * (totals[0] / n)))

    def _rstd_and_mean(self, operands: Operands) -> list[Float[Array, "*vectors"]]:
        """Returns rstd and, if there is one, mean and mean_lo."""
        variance, *mean = operands.moments or self._own_moments(operands)
        rstd = self._rstd(variance)
        if self.options.given or not self.options.norm.centred:
            return [rstd, *mean]
        return [*self.variant.materialised(rstd, *mean)]

    def _own_moments(self, operands: Operands) -> list[Float[Array, "*vectors"]]:
        """Returns the variance of x itself and, if `centred`, mean and mean_lo."""
        x, mask, centred = operands.x, operands.mask, self.options.norm.centred
        shape = self.layout.own_shape(x.shape)
        found = moments_passes.statistics(
            self.variant,
            self.target,
            x,
            *mask,
            layout=self.layout,
            shape=shape,
            centred=centred,
        )
        if centred:
            found = moments_passes.pooled(self.target, found)
        count, *found = (v.reshape(shape) for v in found)
        if mask:
            n = jnp.maximum(count, 1)
        else:  # a constant
            over = self.target.over[0]
            devices = lax.axis_size(over) if over else 1
            n = jnp.full((1,) * x.ndim, self.layout.length * devices, count.dtype)
        if not centred:
            (m2,) = found
            return [m2 / n]
        mean, m2, mean_lo = found
        return [m2 / n, mean, mean_lo]

    @property
    def _product(self) -> Product:
        """Returns the function of products that are added to something."""
        length = self.layout.length
        is_short = isinstance(length, int) and length < SHORT and not self.options.given
        return self._uncontracted if is_short else lax.mul

    def _uncontracted(
        self, a: Float[ArrayLike, "*#x"], b: Float[ArrayLike, "*#x"]
    ) -> Float[Array, "*#x"]:
        """Returns a * b, which LLVM cannot contract with a sum into one operation, which rounds
        once. Of two products it depends on the loop's other operations which one is contracted,
        and a row must have its own bits."""
        return self.variant.uncontracted(lax.mul(a, b))

    def _rstd(self, variance: Float[Array, "*vectors"]) -> Float[Array, "*vectors"]:
        # XLA multiplies m2 by the rounded 1/n, and LLVM would contract the product with the sum
        # in some loops: a row would have two rstd.
        return self.variant.rsqrt(self.variant.uncontracted(variance) + self.options.norm.eps)

    def _arranged(
        self, operands: Operands, *arrays: Shaped[Array, "..."]
    ) -> list[Shaped[Array, "..."]]:
        by_channel = self._by_channel(operands)
        return self.variant.arranged(self.layout, *arrays, by_channel=by_channel)

    def _shape(self, operands: Operands, shape: Shape) -> Shape:
        by_channel = self._by_channel(operands)
        return self.variant.shape(self.layout, shape, by_channel=by_channel)

    def _by_channel(self, operands: Operands) -> bool:
        """Returns whether weights are of channels, and not of each value."""
        weights = operands.weight, operands.bias
        sizes = [math.prod(w.shape[w.ndim - self.layout.ndim :]) for w in weights]
        return math.prod(self.layout.shape) not in sizes

    def _sums(
        self, arrays: Sequence[Float[Array, "*x"]], axes: Sequence[int]
    ) -> Sequence[Float[Array, "*#x"]]:
        return self.variant.reduced(arrays, axes) if axes else arrays


def _deviations(
    x: Float[Array, "*x"],
    rstd: Float[Array, "*#x"],
    mean: Sequence[Float[Array, "*#x"]],
    mask: Sequence[Bool[Array, "*#x"]],
) -> Float[Array, "*x"]:
    """Returns x - mean in the dtype of rstd, x itself if there is no mean."""
    d = reference.centred(x, *mean) if mean else x.astype(rstd.dtype)
    return reference.masked(d, *mask)
