"""Computes a norm of rows in one kernel of XLA:GPU.

XLA:GPU fuses a chain of sums along rows, where each sum depends on the one before, into one
kernel, with all arithmetic in between. The kernel reads a row once, while passes read x for each
sum. But the kernel cannot return its sums, which the gradients of weights need. In rows of `FEW`
values or less, recomputing the sums is faster than reading them.

A reshape, a second axis to sum over, or rows of more than `LONGEST` values cut a chain into
several kernels (`make gpu-compile-check` counts them). XLA:CPU and XLA:TPU have no such kernel.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .elementwise import applied
from .layout import Layout
from .reference import Shape, rsqrt
from .row_norm import RowNorm

LONGEST, FEW = 2**14, 32


class Chain(NamedTuple):
    """Holds the norm of x, `(*mapped, *example)`, in float32. A weight or bias has one number
    for each value, each block of consecutive values, or each example."""

    layout: Layout
    norm: RowNorm

    def serves(self, x: Array, *weights: Shape, has_sums: bool) -> bool:
        """Returns whether the kernel has less memory traffic than the passes. Weights of blocks
        are repeated and written, once for all examples."""
        layout = self.layout
        if layout.groups is None or not all(isinstance(n, int) for n in layout.shape):
            return False
        longest = FEW if has_sums else LONGEST
        # XLA:GPU pads rows to a power of two, and then splits off costly functions.
        if getattr(self.norm.activation, "is_costly", False):
            padded = 1 << (layout.length - 1).bit_length()
            longest *= 4 * padded <= 5 * layout.length
        of_each = any(
            self._repeats(w) and math.prod(w[: len(w) - layout.ndim]) > 1 for w in weights
        )
        is_float = x.dtype.itemsize <= 4
        return 0 < layout.length <= longest and is_float and not of_each

    def y(self, x: Array, weight: Array, bias: Array) -> Array:
        """Returns the normalised x."""
        u, _ = self._standardised(x)
        v = u * self._rows(weight, x) + self._rows(bias, x)
        return self._in_shape(applied(self.norm.activation, v), x)

    def gradients(
        self,
        dy: Array,
        x: Array,
        weight: Array,
        bias: Array,
        *,
        vectors: Sequence[Array],
        shape: Shape,
        wanted: Sequence[bool],
    ) -> list[Array]:
        """Returns the gradient of x, and those of weight and bias, of `shape`, that are
        `wanted`."""
        del vectors  # computed again
        dx = self._dx(dy, x, weight, bias)
        if not any(wanted):
            return [dx]
        for _ in range(2):  # an x other than those of y and dx
            x = lax.optimization_barrier(x)
        at = [jnp.broadcast_to(w, shape) for w in (weight, bias)]
        sums = jax.vjp(lambda *weights: self.y(x, *weights), *at)[1](dy)
        return [dx, *(s for s, is_wanted in zip(sums, wanted, strict=True) if is_wanted)]

    def _dx(self, dy: Array, x: Array, weight: Array, bias: Array) -> Array:
        """Returns the gradient of x by the transpose of the tangent, which XLA:GPU fuses for
        more activations than `RowNorm.g`."""
        # The barrier separates this kernel's statistics from those of y: XLA would merge both
        # and write them to memory.
        u, rstd = self._standardised(lax.optimization_barrier(x))
        weight, bias = (self._rows(w, x) for w in (weight, bias))

        def tangent(dx: Array) -> Array:
            du = weight * self.norm.along_x(self._rows(dx, x), u, rstd, _mean)
            if (activation := self.norm.activation) is not None:
                du = jax.jvp(activation, (weight * u + bias,), (du,))[1]
            return self._in_shape(du, x)

        return jax.linear_transpose(tangent, x)(dy)[0]

    def _standardised(self, x: Array) -> tuple[Array, Array]:
        x = self._rows(x, x)
        if self.norm.centred:
            return self.norm.standardised(x, x.max(-1, keepdims=True), _mean, rsqrt)
        # This is exactly x: XLA:GPU starts a chain only where a row's result is subtracted.
        x = x - jnp.minimum((x * x).max(-1, keepdims=True), 0)
        return self.norm.standardised(x, None, _mean, rsqrt)

    def _repeats(self, shape: Shape) -> bool:
        """Returns whether a weight of this shape is one of a block of values in a row."""
        whole = math.prod(self.layout.shape)
        return math.prod(shape[len(shape) - self.layout.ndim :]) not in (
            1,
            self.layout.size,
            whole,
        )

    def _rows(self, array: Array, x: Array) -> Array:
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
