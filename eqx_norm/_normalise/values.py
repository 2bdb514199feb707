"""Defines `Values`: an example's values, given once, whose moments are taken and normalised by.

Between the two halves stands a strategy. The derivative of both is that of `SUMS` and `AFFINE`:

- moments: d mean = sum(dx) / n and d m2 = 2 sum(dx (x - mean)): one `SUMS`. Moments are
  polynomials of degree 2, so around a mean that does not move, D = sum(x - mean) and
  Q = sum((x - mean)^2), the mean is mean + D/n and m2 is Q - D^2/n, to all orders.
- normalise: u = affine(bias, scale; x, mean) and y = activation(u), so
  du = scale dx + affine(dbias - scale dmean, dscale; x, mean): one `AFFINE`.

Transposed, the backward pass of both is two sums in one pass over x and dy, then vectors, then
one pass for dx. A strategy and the square root are ordinary JAX on vectors: any strategy costs
what the plainest does.
"""

import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Inexact

from eqx_norm.strategies import Moments

from . import collectives, elementwise, reference
from .arithmetic import Arithmetic, BatchImplementation, arithmetic
from .collectives import AxisName
from .primitives import ACTIVATED, DEVIATIONS, STATISTICS, Static, bind
from .reference import Activation, compute_dtype


class Values:
    """Holds the values of one example, of which a layer takes moments and which it normalises.

    **Arguments:**

    - `x`: one example, `(channels, *spatial)`, float or complex, under a `vmap` (or
        `shard_map`, `pmap`) that binds `axis_name`.
    - `axis_name`: the name, or a tuple of names, to take moments over.
    - `mask`: which of the values count, of a shape that broadcasts to `spatial`.
    - `implementation`: as for the layers; see `arithmetic.check`.
    - `has_channels`: whether the first axis is that of channels; or all of x is one channel.
    """

    def __init__(
        self,
        x: Inexact[Array, "..."],
        axis_name: AxisName = (),
        mask: Bool[Array, "..."] | None = None,
        implementation: BatchImplementation = "auto",
        *,
        has_channels: bool = True,
    ):
        self.x = x
        self.axis_name = axis_name
        self.arithmetic = arithmetic(implementation, axis_name, x.dtype)
        self._mask = None if mask is None else jnp.broadcast_to(mask, x.shape[1:])[None]
        self._static = Static(x.ndim - has_channels, self.arithmetic, has_channels)
        # Both halves are differentiated through this one: see `primitives`.
        self._wide = x.astype(compute_dtype(x.dtype))
        if self.arithmetic.is_plain:
            # JAX's own derivative of a selection is NaN where what is not selected is.
            self._wide = reference.counted(self._wide, self._mask)

    def count(self) -> int:
        """Returns how many values of each channel there are in all, known while tracing.

        **Raises:** `NameError` where no enclosing `vmap` binds `axis_name`.
        """
        try:
            names = itertools.chain(*collectives.split_names(self.axis_name))
            examples = math.prod(map(lax.axis_size, names))
        except NameError as error:
            raise NameError(
                f"The axis name {self.axis_name!r} is not bound ({error}). In training the "
                "statistics are taken over a mapped axis of that name, so map the model over "
                "its batch and name that axis:\n"
                f"    jax.vmap(model, axis_name={self.axis_name!r}, in_axes=(0, None), "
                "out_axes=(0, None))(x, state)\n"
                "(one vmap for each name, if there are several); or use what is remembered "
                "instead of the batch: eqx.nn.inference_mode(model)."
            ) from None
        return self._static.flat(self.x.shape)[-1] * examples

    def moments(self) -> Moments:
        """Returns the moments of each channel over its spatial axes and the named axes.

        They are of shape `(channels,)`, in float32 or better, and without a mask their count
        is known while tracing. How they are computed, and how exactly: `reference.statistics`.
        """
        if jnp.iscomplexobj(self.x):
            # A complex channel is two real ones, whose squared deviations add up.
            parts = self._parts.moments()
            mean, mean_rest = _whole(parts.mean), _whole(parts.mean_rest)
            return Moments(parts.count, mean, jnp.add(*jnp.split(parts.m2, 2)), mean_rest)
        # Plain sums are differentiated by JAX.
        x = self._wide if self.arithmetic.is_plain else lax.stop_gradient(self.x)
        arrays = [x, self._mask]
        arrays = [array[None] for array in arrays if array is not None]
        vmapped, mesh = collectives.split_names(self.axis_name)
        if not self.arithmetic.by_example:
            arrays = [collectives.gather(array, vmapped) for array in arrays]
        count, mean, m2, mean_rest = bind(STATISTICS, *arrays, static=self._static)
        moments = Moments(count, mean, m2, mean_rest)
        moments = self.arithmetic.merged(moments, vmapped, mesh)
        # The mask is the same for all channels, and so is the count.
        count = moments.count[0]
        if self._mask is None and not self.arithmetic.by_example:
            count = np.asarray(self.count(), count.dtype)
        moments = dataclasses.replace(moments, count=count)
        return moments if self.arithmetic.is_plain else self.differentiable(moments)

    def differentiable(self, moments: Moments) -> Moments:
        """Returns the moments, which are those of these values, as functions of them."""
        count, mean, m2, mean_rest = jax.tree.leaves(moments)
        columns = [self._column(vector) for vector in (mean, mean_rest)]
        deviations = bind(
            DEVIATIONS,
            self._wide,
            self.x,
            *columns,
            self._mask,
            static=self._static,
            shape=columns[0].shape,
        )
        deviations = [d.reshape(mean.shape) for d in deviations]
        sums = collectives.total(deviations, self.axis_name)
        n = jnp.maximum(count, 1) if isinstance(count, jax.Array) else count
        mean, m2 = moved(mean, m2, *sums, n)
        return Moments(count, mean, m2, mean_rest)

    def normalise(
        self,
        used: Moments,
        weight: Inexact[Array, "..."] | None = None,
        bias: Inexact[Array, "..."] | None = None,
        *,
        eps: float,
        activation: Activation | None = None,
    ) -> Inexact[Array, "..."]:
        r"""Returns $\text{activation}((x - \text{mean}) \cdot \text{rstd} \cdot \text{weight} +
        \text{bias})$, with $\text{rstd} = 1 / \sqrt{\text{variance} + \varepsilon}$, in the
        dtype of `x`; 0 where `mask` is false.

        Everything up to the activation's result is calculated in float32 at least. `used` has
        one value per channel. So do `weight` and `bias`, if they are not `None`; where x has no
        channels, they have one for each value.
        """
        x, dtype = self.x, self._wide.dtype
        weight, bias = (None if v is None else v.astype(dtype) for v in (weight, bias))
        function = elementwise.function(activation)
        if self._static.has_channels or (weight is None and bias is None):
            is_pure = function is None or elementwise.is_pure(function, x.shape, dtype)
        else:
            arithmetic = self.arithmetic if self.arithmetic.is_plain else Arithmetic()
            function, is_pure = elementwise.Affine(weight, bias, function, arithmetic), False
            weight = bias = None
        if jnp.iscomplexobj(x):
            y = self._complex_xhat(used, eps)
            y = y if weight is None else y * self._column(weight)
            y = y if bias is None else y + self._column(bias)
            y = y if function is None else function(y)
            return y if self._mask is None else jnp.where(self._mask, y, 0)
        operands = self._operands(used, weight, bias, eps)
        if function is None or is_pure:
            return self._activated(operands, dtype=x.dtype, activation=function)
        self.arithmetic.check_activation(function)
        # XLA's passes, which can fuse the function's derivative into their sums.
        is_plain = self.arithmetic.is_plain
        arithmetic = self.arithmetic if is_plain else Arithmetic("xla")
        u = self._activated(operands, dtype=dtype, arithmetic=arithmetic)
        function = functools.partial(reference.applied, function)
        if not is_plain and elementwise.has_forward_derivative(function, u.shape, u.dtype):
            pure, arrays = jax.closure_convert(function, u)
            y = elementwise.recomputed(pure, self._static, arrays, u, *operands)
        else:  # then u is kept, as if the function came after the layer
            y = function(u)
        return reference.counted(y, self._mask).astype(x.dtype)

    def _operands(
        self, used: Moments, weight: Array | None, bias: Array | None, eps: float
    ) -> tuple[Any, ...]:
        """Returns bias, scale, x, mean, mean_rest and mask, as the passes take them."""
        dtype, arithmetic = self._wide.dtype, self.arithmetic
        variance = arithmetic.rounded(lambda used: used.variance + eps)(used)
        rstd = arithmetic.rsqrt(variance).astype(dtype)
        mean, mean_rest = used.mean, used.mean_rest
        if mean.dtype != dtype:
            # What a mean in float64 has more than float32 can hold is not lost.
            mean = used.mean.astype(dtype)
            more = used.mean - mean.astype(used.mean.dtype)
            mean_rest = (more + used.mean_rest).astype(dtype)
        scale = rstd if weight is None else arithmetic.rounded(operator.mul)(rstd, weight)
        bias = jnp.zeros_like(rstd) if bias is None else bias
        bias, scale, mean, mean_rest = map(self._column, (bias, scale, mean, mean_rest))
        x = self._wide if self.arithmetic.is_plain else self.x
        return bias, scale, x, mean, mean_rest, self._mask

    def _activated(self, operands: tuple[Any, ...], **replaced: Any) -> Array:
        bias, scale, *centre = operands
        static = self._static._replace(**replaced)
        return bind(ACTIVATED, bias, scale, self._wide, *centre, static=static)[0]

    def _column(self, vector: Array) -> Array:
        """Returns a vector of one number per channel with as many axes as x."""
        static = self._static
        return vector.reshape(*vector.shape[: static.has_channels], *(1,) * static.spatial)

    # --- Complex numbers: a channel is two real ones.

    @functools.cached_property
    def _parts(self) -> "Values":
        """Returns the real and the imaginary parts, as channels."""
        x = self.x if self._static.has_channels else self.x[None]
        mask = None if self._mask is None else self._mask[0]
        implementation: Any = self.arithmetic.implementation
        return Values(_parts(x), self.axis_name, mask, implementation)

    def _complex_xhat(self, used: Moments, eps: float) -> Array:
        """Returns x normalised, without weight and bias."""
        variance = jnp.concatenate([used.variance] * 2)
        parts = Moments.of(_parts(used.mean), variance, _parts(used.mean_rest))
        return _whole(self._parts.normalise(parts, eps=eps)).reshape(self.x.shape)


@jax.custom_jvp
def moved(mean: Array, m2: Array, sum_d: Array, half_d2: Array, n: ArrayLike) -> Any:
    """Returns `mean + sum_d / n` and `m2 + 2 half_d2 - sum_d^2 / n`, where both sums are 0."""
    del sum_d, half_d2, n  # their derivatives are not
    return mean, m2


def _parts(x: Array) -> Array:
    return jnp.concatenate([x.real, x.imag])


def _whole(parts: Array) -> Array:
    return lax.complex(*jnp.split(parts, 2))
