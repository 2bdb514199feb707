"""Computes the formulas that every implementation of a pass over x keeps to.

Arrays have one number of axes; the last three of x are (examples, channels, values), and a
vector has size 1 along an axis where it does not differ. The mean is given as an unevaluated
pair, `mean + mean_rest`. x may be of a lower precision than the vectors, and is converted
first. A `mask`, if there is one, tells which places count: the others add nothing to a sum,
whatever they hold, and 0 is computed for them.

A *total* takes arrays of one shape and axes to sum over, and returns one sum each, those axes
kept with size 1. Every platform but the CPU gets `plain`, the CPU `on_cpu.total`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from eqx_norm.strategies._pair import rounded

Activation = Callable[[Array], Array]
Total = Callable[[Sequence[Array], Sequence[int]], tuple[Array, ...]]


def plain(arrays: Sequence[Array], axes: Sequence[int]) -> tuple[Array, ...]:
    """Returns one sum each, in XLA's own order: XLA for GPU and TPU fuses sums that read the
    same array into one pass."""
    return tuple(lax.expand_dims(lax.reduce_sum(a, tuple(axes)), tuple(axes)) for a in arrays)


def compute_dtype(dtype: Any) -> jnp.dtype:
    """Returns the dtype to calculate in: the input's own, but float32 at least."""
    return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def statistics(
    x: Float[Array, "*ensemble examples channels values"],
    mask: Bool[Array, "*#ensemble examples 1 values"] | None = None,
    *,
    total: Total = plain,
    sharded: bool = False,
) -> tuple[Array, Array, Array, Array]:
    r"""Returns count, mean, m2 and mean_rest of each channel, `(*ensemble, channels)`.

    With $k$ the first value of the channel that counts, every quantity in float32 at least,

    $$m = k + \tfrac{1}{n} \sum_i (x_i - k), \quad d_i = x_i - m, \quad
      c = \tfrac{1}{n} \sum_i d_i, \quad
      \text{m2} = \max\big(\sum_i d_i^2 - n c^2,\; 0\big),$$

    and the mean is $m + c$, returned as the nearest number and the rest. In exact arithmetic
    any $k$ gives the same. Without it the mean of a constant is not that constant, because
    XLA multiplies a sum by the rounded 1/n; with it, a constant channel has m2 = 0 to the bit
    (the failure of https://github.com/BVLC/caffe/issues/3963). $c$ is what rounding the mean
    has left out.

    Where XLA splits the examples over devices, `sharded`, the first value is found by a sum:
    to take it from an array, XLA would send the array to all devices.
    """
    dtype = compute_dtype(x.dtype)
    # Before anything is sliced: XLA:CPU slices bfloat16 by writing all of it as float32.
    x = x.astype(dtype)
    axes = (x.ndim - 3, x.ndim - 1)
    if mask is None:
        n = x.shape[-3] * x.shape[-1]
        count = jnp.full((*x.shape[:-3], x.shape[-2]), n, dtype)
        first = x[..., :1]
        k = _of_example(0, first) if sharded else first[..., :1, :, :]
    else:
        n = mask.sum(axes, keepdims=True, dtype=dtype)
        count = jnp.broadcast_to(n[..., 0, :, 0], (*x.shape[:-3], x.shape[-2]))
        n = jnp.maximum(n, 1)
        k = (_first_counted_by_sum if sharded else first_counted)(x, mask)
    (sum_from_k,) = total([counted(x - k, mask)], axes)
    m = k + rounded(sum_from_k / n)
    d = counted(x - m, mask)
    sum_d, sum_d2 = total([d, d * d], axes)
    c = rounded(sum_d / n)
    mean = m + c
    mean_rest = c - (mean - m)
    m2 = jnp.maximum(sum_d2 - sum_d * c, 0)
    return count, mean[..., 0, :, 0], m2[..., 0, :, 0], mean_rest[..., 0, :, 0]


def sums(
    g: Array,
    x: Array,
    mean: Array,
    mean_rest: Array,
    mask: Array | None = None,
    *,
    shape: tuple[int, ...],
    total: Total = plain,
) -> tuple[Array, Array]:
    """Returns `sum(g)` and `sum(g * (x - mean))`, over the axes along which `shape` is 1."""
    axes = [
        i for i, (full, kept) in enumerate(zip(g.shape, shape, strict=True)) if full != kept
    ]
    g = counted(g, mask)
    sum_g, sum_gd = total([g, g * counted(centred(x, mean, mean_rest), mask)], axes)
    return sum_g, sum_gd


def affine(
    bias: Array,
    scale: Array,
    x: Array,
    mean: Array,
    mean_rest: Array,
    mask: Array | None = None,
) -> Array:
    """Returns `bias + scale * (x - mean)`, of the shape of `x`."""
    return counted(bias + scale * centred(x, mean, mean_rest), mask)


def activated(
    activation: Activation | None,
    bias: Array,
    scale: Array,
    x: Array,
    mean: Array,
    mean_rest: Array,
    mask: Array | None = None,
) -> Array:
    """Returns `activation(affine(...))`; 0 where the mask is false."""
    return counted(applied(activation, affine(bias, scale, x, mean, mean_rest)), mask)


def activation_jvp(
    g: Array,
    bias: Array,
    scale: Array,
    x: Array,
    mean: Array,
    mean_rest: Array,
    mask: Array | None = None,
    *,
    activation: Activation | None,
) -> Array:
    """Returns the activation's derivative at `affine(...)`, times `g`; 0 where the mask is
    false."""
    if activation is not None:
        u = affine(bias, scale, x, mean, mean_rest)
        _, g = jax.jvp(functools.partial(applied, activation), (u,), (g,))
    return counted(g, mask)


def applied(activation: Activation | None, u: Array) -> Array:
    """Returns `activation(u)` in the dtype of `u`, whatever its own is."""
    return u if activation is None else activation(u).astype(u.dtype)


@jax.custom_jvp
def rsqrt(x: Array) -> Array:
    r"""Returns $1 / \sqrt{x}$, with the derivatives of `derivatives.py`."""
    return lax.rsqrt(x)


def centred(x: Array, mean: Array, mean_rest: Array) -> Array:
    """Returns `x - mean`, in this order: exact where x is near a mean far from 0."""
    return (x.astype(mean.dtype) - mean) - mean_rest


def counted(values: Array, mask: Array | None = None) -> Array:
    """Returns the values that count, and 0 for the others."""
    return values if mask is None else jnp.where(mask, values, 0)


def first_counted(x: Array, mask: Array) -> Array:
    """Returns the first value of each channel that counts, and 0 where none does."""
    example = jnp.argmax(mask.any(-1, keepdims=True), axis=-3, keepdims=True)
    x, mask = jnp.take_along_axis(x, example, -3), jnp.take_along_axis(mask, example, -3)
    place = jnp.argmax(mask, axis=-1, keepdims=True)
    return jnp.where(mask.any(-1, keepdims=True), jnp.take_along_axis(x, place, -1), 0)


def _first_counted_by_sum(x: Array, mask: Array) -> Array:
    """Returns `first_counted`: of each example, and of these the first."""
    place = jnp.argmax(mask, axis=-1, keepdims=True)
    first, some = jnp.take_along_axis(x, place, -1), mask.any(-1, keepdims=True)
    number = jnp.where(some, _numbers(some), some.shape[-3]).min(-3, keepdims=True)
    return _of_example(number, first)


def _of_example(number: Array | int, values: Array) -> Array:
    """Returns the values of one example, as a sum over examples; 0 where there is none."""
    return jnp.where(_numbers(values) == number, values, 0).sum(-3, keepdims=True)


def _numbers(array: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, array.shape, array.ndim - 3)
