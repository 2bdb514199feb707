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
from jaxtyping import Array

from eqx_norm._jax.arithmetic import uncontracted
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.reference import Shape, hardware_rsqrt
from eqx_norm._normalise.formulas.row_norm import Operands, RowNorm, Sums

LONGEST, FEW = 2**14, 32


class Chain(NamedTuple):
    """Holds the norm of x, `(*mapped, *example)`, in float32. A weight or bias has one number
    for each value, each block of consecutive values, or each example."""

    layout: Layout
    norm: RowNorm

    def serves(self, at: Operands, sums: Sums) -> bool:
        """Returns whether the kernel has less memory traffic than the passes. Weights of blocks
        are repeated and written, once for all examples."""
        layout = self.layout
        if layout.groups is None or not all(isinstance(n, int) for n in layout.shape):
            return False
        if layout.ndim == 0:
            return False
        longest = LONGEST if sums.shape is None else FEW
        # XLA:GPU pads rows to a power of two, and then splits off costly functions.
        if self.norm.activation is not None and self.norm.activation.is_costly:
            padded = 1 << (layout.length - 1).bit_length()
            longest *= 4 * padded <= 5 * layout.length
        shapes = at.weight.shape, at.bias.shape, *([] if sums.shape is None else [sums.shape])
        of_each = any(
            self._repeats(w) and math.prod(w[: len(w) - layout.ndim]) > 1 for w in shapes
        )
        is_float = at.x.dtype.itemsize <= 4
        return 0 < layout.length <= longest and is_float and not of_each

    def y(self, at: Operands) -> Array:
        """Returns the normalised x."""
        u, _ = self._standardised(at.x)
        v = u * self._rows(at.weight) + self._rows(at.bias)
        activation = self.norm.activation
        return self._in_shape(v if activation is None else activation(v), at.x)

    def gradients(self, dy: Array, at: Operands, sums: Sums) -> list[Array]:
        """Returns the gradients of x and weights, as `choose.gradients` does. The
        moments are computed again."""
        dx = self._dx(dy, at)
        if sums.shape is None:
            return [dx]
        for _ in range(2):  # an x other than those of y and dx
            at = at._replace(x=lax.optimization_barrier(at.x))
        weights = [jnp.broadcast_to(w, sums.shape) for w in (at.weight, at.bias)]
        pull_back = jax.vjp(lambda *weights: self.y(Operands(at.x, *weights)), *weights)[1]
        return [dx, *sums.chosen(*pull_back(dy))]

    def _dx(self, dy: Array, at: Operands) -> Array:
        """Returns the gradient of x by the transpose of the tangent, which XLA:GPU fuses for
        more activations than `RowNorm.g`."""
        # The barrier separates this kernel's statistics from those of y: XLA would merge both
        # and write them to memory.
        u, rstd = self._standardised(lax.optimization_barrier(at.x))
        weight, bias = map(self._rows, (at.weight, at.bias))

        def tangent(dx: Array) -> Array:
            du = weight * self.norm.along_x(self._rows(dx), u, rstd, _mean)
            if (activation := self.norm.activation) is not None:
                du = jax.jvp(activation, (weight * u + bias,), (du,))[1]
            return self._in_shape(du, at.x)

        return jax.linear_transpose(tangent, at.x)(dy)[0]

    def _standardised(self, x: Array) -> tuple[Array, Array]:
        is_coarse, x = x.dtype == jnp.bfloat16, self._rows(x)
        if not self.norm.centred:
            # x - min(max(x^2), 0) is x to the bit. XLA:GPU starts a chain only where a row's
            # result is subtracted.
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
        """Returns whether a weight of this shape is one of a block of values in a row."""
        values, size = math.prod(self.layout.shape), self.layout.size
        return math.prod(shape[len(shape) - self.layout.ndim :]) not in (1, size, values)

    def _rows(self, array: Array) -> Array:
        """Returns an array as float32 with a row for each group. The barrier materialises the
        array, because a reshape inside the kernel would cut the kernel."""
        layout = self.layout
        if layout.ndim > 1 or layout.groups != 1:
            if self._repeats(array.shape):
                mapped = array.shape[: array.ndim - layout.ndim]
                array = jnp.broadcast_to(array, (*mapped, *layout.shape))
            array = array.reshape(layout.rows(array.shape))
            array = array if array.size == 1 else lax.optimization_barrier(array)
        return array.astype(jnp.float32)

    def _in_shape(self, rows: Array, x: Array) -> Array:
        rows = rows.astype(x.dtype)
        if rows.shape != x.shape:
            rows = lax.optimization_barrier(rows)  # as in `_rows`
        return rows.reshape(x.shape)


def _mean(rows: Array) -> Array:
    return rows.sum(-1, keepdims=True) / rows.shape[-1]
