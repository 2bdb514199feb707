"""Computes a norm of one example in one kernel of XLA:GPU.

XLA:GPU fuses a chain of sums along rows, where each sum depends on the one before, into one
kernel, with all arithmetic in between. The kernel reads a row once, while the passes of
`primitives` read x for each sum. But the kernel cannot return its sums, which the gradients of
weights need. It is used where these sums are not needed: for y that is not differentiated, and
for the gradient of x alone (weights frozen, or none), which recomputes the sums. In rows of
`FEW` values or less, recomputing the sums is faster than reading them: there the kernel is used
in training, too, with another kernel for the gradients of weights.

A reshape, a second axis to sum over, or rows of more than `LONGEST` values cut a chain into
several kernels (`make gpu-compile-check` counts them). XLA:CPU and XLA:TPU have no such kernel,
but on a CPU, y that is not differentiated takes cheaper passes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from . import on_cpu
from .elementwise import applied
from .linear import linear_call
from .lowering import Args, Context, is_partitioned, lowered, operands, varying
from .reference import Shape, rsqrt
from .row_norm import RowNorm

LONGEST, FEW = 2**14, 32


class Chain(NamedTuple):
    """Holds the norm of an example of `shape`, in float32. A weight or bias has one number for
    each value or each block of consecutive values, or is `None`."""

    shape: Shape
    groups: int
    repeats: int  # values of a row for each weight; 0 if weights broadcast inside the kernel
    norm: RowNorm

    @property
    def rows(self) -> Shape:
        """Returns the shape in which the chain computes: a row, or one for each group."""
        if len(self.shape) == 1 and self.groups == 1:
            return self.shape
        return self.groups, math.prod(self.shape) // self.groups

    def y(self, x: Array, weight: Array | None, bias: Array | None) -> Array:
        """Returns the normalised x."""
        u, _ = self._standardised(x)
        _, u = self._weighted(u, u, weight, bias)
        return self._in_shape(applied(self.norm.activation, u), x.dtype)

    def tangent(self, dx: Array, x: Array, weight: Array | None, bias: Array | None) -> Array:
        """Returns the tangent of y along that of x."""
        # The barrier separates this kernel's statistics from those of y: XLA would merge both
        # and write them to memory.
        u, rstd = self._standardised(lax.optimization_barrier(x))
        du = self.norm.along_x(self._rows(dx), u, rstd, _mean)
        du, u = self._weighted(du, u, weight, bias)
        if (activation := self.norm.activation) is not None:
            du = jax.jvp(activation, (u,), (du,))[1]
        return self._in_shape(du, x.dtype)

    def _standardised(self, x: Array) -> tuple[Array, Array]:
        x = self._rows(x)
        if self.norm.centred:
            return self.norm.standardised(x, x.max(-1, keepdims=True), _mean, rsqrt)
        # This is exactly x: XLA:GPU starts a chain only where a row's result is subtracted.
        x = x - jnp.minimum((x * x).max(-1, keepdims=True), 0)
        return self.norm.standardised(x, None, _mean, rsqrt)

    def _weighted(
        self, du: Array, u: Array, weight: Array | None, bias: Array | None
    ) -> tuple[Array, Array]:
        """Returns `weight * du` and `weight * u + bias`."""
        if weight is not None:
            weight = self._rows(weight)
            du, u = weight * du, weight * u
        return du, u if bias is None else u + self._rows(bias)

    def _rows(self, array: Array) -> Array:
        """Returns an array as float32 with a row for each group. The barrier materialises the
        array, because a reshape inside the kernel would cut the kernel."""
        if self.rows != self.shape:
            if self.repeats and array.shape != self.shape:
                array = array.reshape(-1, *(1,) * (len(self.shape) - 1))
                array = jnp.broadcast_to(array, self.shape)
            array = lax.optimization_barrier(array.reshape(self.groups, -1))
        return array.astype(jnp.float32)

    def _in_shape(self, rows: Array, dtype: Any) -> Array:
        rows = rows.astype(dtype)
        if self.rows != self.shape:
            rows = lax.optimization_barrier(rows)  # for the transpose, which is a kernel, too
        return rows.reshape(self.shape)

    def is_faster(self, x: Any, weights: Args, *, only_x: bool = True) -> bool:
        """Returns whether the kernel has less memory traffic than the passes, for x and weights
        of all examples: repeated weights are written and read, and the passes read x twice
        more. Gradients of weights read x once more, which is worthwhile in short rows."""
        if not only_x and self.rows[-1] > FEW:
            return False
        repeated = sum(w.size for w in weights) * self.repeats
        return self.rows[-1] <= LONGEST and 2 * repeated * 4 <= 2 * x.size * x.dtype.itemsize


def _mean(rows: Array) -> Array:
    return rows.sum(-1, keepdims=True) / rows.shape[-1]


class Forms(NamedTuple):
    """Holds functions of the operands of `ONE_KERNEL` except y (x, weights and vectors), of one
    example or mapped."""

    y: Callable[..., Array]
    y_by_passes: Callable[..., Array]
    tangent: Callable[..., Array]  # of dx and the operands
    tangent_by_passes: Callable[..., Array]
    undifferentiated: Callable[..., Array] | None  # y on a CPU, if not differentiated


def dispatched(
    chain: Chain,
    by_passes: Callable[..., Array],
    undifferentiated: Callable[..., Array],
    y: Array,
    x: Array,
    weights: tuple[Array | None, Array | None],
    vectors: Sequence[Array],
) -> Array:
    """Returns y, which a GPU computes by the chain.

    **Arguments:**

    - `by_passes`: computes y from x, weight, bias and `vectors`.
    - `undifferentiated`: computes y from x, weight and bias, on a CPU if not differentiated.
    - `y`: the result of the passes, whose derivative is used unless the kernel `is_faster`.
    """
    leaves, structure = jax.tree.flatten(weights)
    n = len(leaves)

    def y_by_passes(x: Array, *others: Array) -> Array:
        return by_passes(x, *structure.unflatten(others[:n]), others[n:])

    forms = Forms(
        lambda x, *o: chain.y(x, *structure.unflatten(o[:n])),
        y_by_passes,
        lambda dx, x, *o: chain.tangent(dx, x, *structure.unflatten(o[:n])),
        lambda dx, x, *o: jax.jvp(lambda x: y_by_passes(x, *o), (x,), (dx,))[1],
        lambda x, *o: undifferentiated(x, *structure.unflatten(o[:n])),
    )
    arrays = varying([y, x, *leaves, *vectors])
    return ONE_KERNEL.bind(*arrays, forms=forms, is_faster=chain.is_faster, n=n)


def _lower(
    platform: str, context: Context, *arrays: Any, forms: Forms, is_faster: Any, n: int
) -> Args:
    _, x, *others = operands(context)
    sizes = (*x.shape, *(size for w in others[:n] for size in w.shape))
    is_known = all(isinstance(size, int) for size in sizes)
    on_a_cpu = platform == "cpu"
    if not is_known or (on_a_cpu and is_partitioned(context)):
        return arrays[:1]
    form = forms.undifferentiated if on_a_cpu else forms.y if is_faster(x, others[:n]) else None
    if form is None:
        return arrays[:1]

    def y(_: Array, x: Array, *others: Array) -> list[Array]:
        return [form(on_cpu.converted(x) if on_a_cpu else x, *others).astype(x.dtype)]

    return lowered(y, context, *arrays)


def _jvp(primals: Args, tangents: Args, *, forms: Forms, is_faster: Any, n: int) -> Args:
    y, x, *others = primals
    dy, dx, *along = tangents
    along, weights = along[:n], others[:n]
    only_x = all(isinstance(tangent, ad.Zero) for tangent in along)
    if isinstance(dx, ad.Zero) or not is_faster(x, weights, only_x=only_x):
        return y, dy

    def by_passes(dx: list[Array], operands: list[Array]) -> list[Array]:
        return [forms.tangent_by_passes(*dx, *operands)]

    def in_one_kernel(dx: list[Array], operands: list[Array]) -> list[Array]:
        return [forms.tangent(*dx, *operands)]

    def of_weights(y: Any, barriers: int, along: list[Array], operands: Args) -> list[Array]:
        x, *others = operands
        for _ in range(barriers):  # an x other than those of y and `Chain.tangent`
            x = lax.optimization_barrier(x)
        return [jax.jvp(lambda *w: y(x, *w, *others[n:]), (*others[:n],), (*along,))[1]]

    (dy,) = linear_call(by_passes, [dx], [x, *others], on_gpu=in_one_kernel)
    if not only_x:
        along = list(map(ad.instantiate_zeros, along))
        default = functools.partial(of_weights, forms.y_by_passes, 0)
        on_gpu = functools.partial(of_weights, forms.y, 2)
        dy += linear_call(default, along, [x, *others], on_gpu=on_gpu)[0]
    forms = forms._replace(undifferentiated=None)
    return ONE_KERNEL.bind(*primals, forms=forms, is_faster=is_faster, n=n), dy


def _batch(
    axis: Any, arrays: Args, places: Args, *, forms: Forms, is_faster: Any, n: int
) -> tuple[Any, int | None]:
    del axis
    y, *operands = arrays
    x, *others = places[1:]
    if x or places[0] is None:  # rows are not contiguous, as in a norm over channels
        return y, places[0]
    mapped = Forms(
        jax.vmap(forms.y, (x, *others)),
        jax.vmap(forms.y_by_passes, (x, *others)),
        jax.vmap(forms.tangent, (x, x, *others)),
        jax.vmap(forms.tangent_by_passes, (x, x, *others)),
        forms.undifferentiated and jax.vmap(forms.undifferentiated, (x, *others)),
    )
    y = jnp.moveaxis(y, places[0], 0)
    return ONE_KERNEL.bind(y, *operands, forms=mapped, is_faster=is_faster, n=n), 0


ONE_KERNEL = Primitive("eqx_norm_one_kernel")
ONE_KERNEL.def_impl(lambda y, *_, **parameters: y)
ONE_KERNEL.def_abstract_eval(lambda y, *_, **parameters: y)
mlir.register_lowering(ONE_KERNEL, lambda context, *arrays, **_: arrays[:1])
for _platform in ("cpu", "gpu"):
    mlir.register_lowering(ONE_KERNEL, functools.partial(_lower, _platform), _platform)
batching.fancy_primitive_batchers[ONE_KERNEL] = _batch
ad.primitive_jvps[ONE_KERNEL] = _jvp
