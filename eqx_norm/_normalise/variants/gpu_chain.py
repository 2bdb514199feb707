"""Computes a norm of rows in one kernel of XLA:GPU.

XLA:GPU fuses a chain of sums along rows, where each sum depends on the one before, into one
kernel, with all arithmetic in between. The kernel reads a row once, while passes read x for
each sum. But the kernel cannot return its sums, which the gradients of weights need. In rows of
`FEW` values or less, recomputing the sums is faster than reading them.

A reshape, a second axis to sum over, or rows of more than `LONGEST` values cut a chain into
several kernels (`make gpu-compile-check` counts them). XLA:CPU and XLA:TPU have no such kernel.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from eqx_norm._jax.arithmetic import uncontracted
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.reference import Shape, hardware_rsqrt
from eqx_norm._normalise.formulas.row_norm import Operands, RowNorm, Wanted

LONGEST, FEW = 2**14, 32


class Chain(NamedTuple):
    """Computes y and gradients of x, `(*mapped, *example)`, in float32, in one kernel each. A
    weight or bias has one number for each value, each block of consecutive values, or each
    example."""

    layout: Layout
    norm: RowNorm

    def serves(self, operands: Operands, wanted: Wanted) -> bool:
        """Returns whether XLA:GPU makes one kernel of the chain, which should move less than
        passes."""
        layout = self.layout
        if layout.groups is None or layout.ndim == 0:
            return False
        if not all(isinstance(n, int) for n in layout.shape):
            return False
        if operands.x.dtype.itemsize > 4:
            return False
        shapes = [operands.weight.shape, operands.bias.shape]
        if wanted.shape is not None:
            shapes.append(wanted.shape)
        for shape in shapes:
            # Weights of blocks are repeated and written, once for all examples.
            mapped = shape[: len(shape) - layout.ndim]
            if self._repeats(shape) and math.prod(mapped) > 1:
                return False
        activation = self.norm.activation
        if activation is not None and activation.is_costly:
            # XLA:GPU pads rows to a power of two, and then splits off costly functions.
            padded = 1 << (layout.length - 1).bit_length()
            if 4 * padded > 5 * layout.length:
                return False
        longest = LONGEST if wanted.shape is None else FEW
        return 0 < layout.length <= longest

    def y(self, operands: Operands) -> Float[Array, "*x"]:
        """Returns the normalised x."""
        x, weight, bias, *_ = operands
        u, _ = self._standardised(x)
        v = u * self._rows(weight) + self._rows(bias)
        if self.norm.activation is not None:
            v = self.norm.activation(v)
        return self._in_shape(v, x)

    def gradients(
        self, dy: Float[Array, "*x"], operands: Operands, wanted: Wanted
    ) -> list[Float[Array, "..."]]:
        """Returns the gradients of x and weights, as `choose.gradients` does. The moments are
        computed again."""
        x, weight, bias, *_ = operands
        dx = self._dx(dy, operands)
        if wanted.shape is None:
            return [dx]
        # Two barriers, so that XLA merges this x neither with that of y nor with that of dx.
        x = lax.optimization_barrier(lax.optimization_barrier(x))
        weights = [jnp.broadcast_to(w, wanted.shape) for w in (weight, bias)]
        pull_back = jax.vjp(lambda *weights: self.y(Operands(x, *weights)), *weights)[1]
        return [dx, *wanted.chosen(*pull_back(dy))]

    def _dx(self, dy: Float[Array, "*x"], operands: Operands) -> Float[Array, "*x"]:
        """Returns the gradient of x by the transpose of the tangent, which XLA:GPU fuses for
        more activations than `RowNorm.g`."""
        x, weight, bias, *_ = operands
        # The barrier separates this kernel's statistics from those of y. XLA would merge both
        # (https://github.com/jax-ml/jax/issues/13999) and write them to memory: LayerNorm
        # moves 7.0 units in place of 5.0 (jax 0.12.0.1). Without it
        # tests/operation/test_on_gpu.py, `barriers_between_passes`, fails.
        u, rstd = self._standardised(lax.optimization_barrier(x))
        weight, bias = self._rows(weight), self._rows(bias)
        activation = self.norm.activation

        def tangent(dx: Float[Array, "*x"]) -> Float[Array, "*x"]:
            dv = weight * self.norm.jacobian_product(self._rows(dx), u, rstd, _mean)
            if activation is not None:
                dv = jax.jvp(activation, (weight * u + bias,), (dv,))[1]
            return self._in_shape(dv, x)

        return jax.linear_transpose(tangent, x)(dy)[0]

    def _standardised(
        self, x: Float[Array, "*x"]
    ) -> tuple[Float[Array, "*rows n"], Float[Array, "*rows 1"]]:
        """Returns u and rstd, with a row for each group."""
        is_coarse = x.dtype == jnp.bfloat16
        x = self._rows(x)
        if not self.norm.centred:
            # x - min(max(x^2), 0) is x to the bit. XLA:GPU makes one kernel of a chain only
            # where a row's result is subtracted (its softmax_rewriter_triton.cc; no issue
            # upstream). Without it the gradient of x moves 6.0 units in place of 3.0, with y
            # 8.0 in place of 5.0 (jax 0.12.0.1), and tests/layers/test_platforms.py,
            # `one_kernel_over_devices`, fails.
            x = x - jnp.minimum((x * x).max(-1, keepdims=True), 0)
        elif is_coarse:
            # In a constant row the sum of up to 2^16 numbers of 8 bits is exact. XLA multiplies
            # it by the rounded 1/n, and the result, rounded to 22 bits, is the number. With a
            # maximum in its place XLA:GPU makes several kernels, in rows of 1280 for example.
            x = x - lax.reduce_precision(_mean(x), exponent_bits=8, mantissa_bits=21)
            x = x - uncontracted(_mean(x))
        else:
            x = self.norm.centre(x, x.max(-1, keepdims=True), _mean)
        return self.norm.scaled(x, _mean, hardware_rsqrt)

    def _repeats(self, shape: Shape) -> bool:
        """Returns whether each weight of this shape belongs to a block of values in a row."""
        values, size = math.prod(self.layout.shape), self.layout.moments_size
        return math.prod(shape[len(shape) - self.layout.ndim :]) not in (1, size, values)

    def _rows(self, array: Float[Array, "*#x"]) -> Float[Array, "*rows n"]:
        """Returns an array as float32 with a row for each group. The barrier materialises the
        array, because a reshape inside the kernel would cut the kernel."""
        layout = self.layout
        if layout.ndim > 1 or layout.groups != 1:
            if self._repeats(array.shape):
                mapped = array.shape[: array.ndim - layout.ndim]
                array = jnp.broadcast_to(array, (*mapped, *layout.shape))
            array = array.reshape(layout.rows(array.shape))
            if array.size != 1:
                array = lax.optimization_barrier(array)
        return array.astype(jnp.float32)

    def _in_shape(
        self, rows: Float[Array, "*rows n"], x: Float[Array, "*x"]
    ) -> Float[Array, "*x"]:
        rows = rows.astype(x.dtype)
        if rows.shape != x.shape:
            rows = lax.optimization_barrier(rows)  # as in `_rows`
        return rows.reshape(x.shape)


def _mean(rows: Float[Array, "*rows n"]) -> Float[Array, "*rows 1"]:
    return rows.sum(-1, keepdims=True) / rows.shape[-1]
