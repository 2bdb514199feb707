"""The formulas: what every implementation of the three passes over x computes.

In all of them the mean is given as an unevaluated pair, `mean + rest`; x may be of a lower
precision than the vectors, and is converted first. Vectors have as many axes as x, of size 1
where they do not differ. A `mask`, if there is one, tells which places count: the others add
nothing to a sum, whatever is found there, and `affine` is 0 there. `total` is how the platform
sums best (`totals`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from . import totals
from .totals import Total

Activation = Callable[[Array], Array]


def compute_dtype(dtype: Any) -> jnp.dtype:
    """The precision to calculate in: the input's own, but float32 at least."""
    return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def statistics(
    x: Float[Array, "*ensemble examples channels values"],
    mask: Bool[Array, "*#ensemble examples 1 values"] | None = None,
    *,
    total: Total = totals.plain,
) -> tuple[Array, Array, Array, Array]:
    r"""Count, mean, rest and m2 of each channel, `(*ensemble, channels)`.

    With $k$ the first value of the channel that counts, every quantity in float32 at least,

    $$m = k + \tfrac{1}{n} \sum_i (x_i - k), \quad d_i = x_i - m, \quad
      c = \tfrac{1}{n} \sum_i d_i, \quad
      \text{m2} = \max\big(\sum_i d_i^2 - n c^2,\; 0\big),$$

    and the mean is $m + c$, returned as the nearest number and the rest. In exact arithmetic
    any $k$ gives the same. Without it the mean of a constant is not that constant, because
    XLA multiplies a sum by the rounded 1/n; with it, a constant channel has m2 = 0 to the bit
    (the failure of https://github.com/BVLC/caffe/issues/3963). $c$ is what rounding the mean
    has left out.
    """
    dtype = compute_dtype(x.dtype)
    # Before anything is sliced: XLA:CPU slices bfloat16 by writing all of it as float32.
    x = x.astype(dtype)
    axes = (x.ndim - 3, x.ndim - 1)
    if mask is None:
        n = x.shape[-3] * x.shape[-1]
        count = jnp.full((*x.shape[:-3], x.shape[-2]), n, dtype)
        k = x[..., :1, :, :1]
    else:
        n = mask.sum(axes, keepdims=True, dtype=dtype)
        count = jnp.broadcast_to(n[..., 0, :, 0], (*x.shape[:-3], x.shape[-2]))
        n = jnp.maximum(n, 1)
        k = _first_counted(x, mask)
    (sum_from_k,) = total([counted(x - k, mask)], axes)
    m = k + _rounded(sum_from_k / n)
    d = counted(x - m, mask)
    sum_d, sum_d2 = total([d, d * d], axes)
    c = _rounded(sum_d / n)
    mean = m + c
    rest = c - (mean - m)
    m2 = jnp.maximum(sum_d2 - sum_d * c, 0)
    return count, mean[..., 0, :, 0], rest[..., 0, :, 0], m2[..., 0, :, 0]


def sums(
    g: Array,
    x: Array,
    mean: Array,
    rest: Array,
    mask: Array | None = None,
    *,
    shape: tuple[int, ...],
    total: Total = totals.plain,
) -> tuple[Array, Array]:
    """`sum(g)` and `sum(g * (x - mean))`, over the axes along which `shape` has size 1."""
    axes = [
        i for i, (full, kept) in enumerate(zip(g.shape, shape, strict=True)) if full != kept
    ]
    g = counted(g, mask)
    sum_g, sum_gd = total([g, g * counted(centred(x, mean, rest), mask)], axes)
    return sum_g, sum_gd


def affine(
    a: Array,
    b: Array,
    x: Array,
    mean: Array,
    rest: Array,
    mask: Array | None = None,
) -> Array:
    """`a + b * (x - mean)`, of the shape of `x`."""
    return counted(a + b * centred(x, mean, rest), mask)


def activated(
    activation: Activation | None, a: Array, b: Array, x: Array, *rest: Array
) -> Array:
    """`activation(affine(a, b, x, ...))`; 0 where the mask is false."""
    mean, low, *mask = rest
    return counted(applied(activation, affine(a, b, x, mean, low)), *mask)


def slope(
    activation: Activation | None, g: Array, a: Array, b: Array, x: Array, *rest: Array
) -> Array:
    """The derivative of `activated` in its affine, times `g`; 0 where the mask is false."""
    mean, low, *mask = rest
    if activation is None:
        return counted(g, *mask)
    u = affine(a, b, x, mean, low)
    _, tangent = jax.jvp(functools.partial(applied, activation), (u,), (g,))
    return counted(tangent, *mask)


def applied(activation: Activation | None, u: Array) -> Array:
    """Returns `activation(u)` in the dtype of `u`, whatever its own is."""
    return u if activation is None else activation(u).astype(u.dtype)


@jax.custom_jvp
def rsqrt(x: Array) -> Array:
    r"""Returns $1 / \sqrt{x}$, with derivatives that hold wherever their results can be held.

    That of `lax.rsqrt` is $-r / (2 x)$ times the tangent: in float32, 0 from $x = 10^{25}$ on,
    and infinite below $10^{-25}$. Multiplied by $r$ three times the tangent (or the cotangent,
    which is as large as the standard deviation) never leaves the range in between.
    """
    return lax.rsqrt(x)


@rsqrt.defjvp
def _(primals: Any, tangents: Any) -> Any:
    r = rsqrt(*primals)
    return r, -0.5 * (r * (r * (r * tangents[0])))


def centred(x: Array, mean: Array, rest: Array) -> Array:
    """`x - mean`, in this order: x - mean is exact where x is near a mean far from 0."""
    return (x.astype(mean.dtype) - mean) - rest


def counted(values: Array, mask: Array | None = None) -> Array:
    """The values that count, and 0 for the others."""
    return values if mask is None else jnp.where(mask, values, 0)


def _rounded(product: Array) -> Array:
    """The product as a number of its own, never half of a fused multiply-add.

    XLA computes a vector again in each loop that uses it, and in some of them LLVM contracts
    k + sum * (1/n): the mean that was subtracted would not be the mean that was returned.
    `optimization_barrier` is no help, it is gone by then. (jax 0.10.2 and 0.12.0.1.)
    """
    return jnp.where(jnp.isnan(product), jnp.nan, product)


def _first_counted(x: Array, mask: Array) -> Array:
    example = jnp.argmax(mask.any(-1, keepdims=True), axis=-3, keepdims=True)
    x, mask = jnp.take_along_axis(x, example, -3), jnp.take_along_axis(mask, example, -3)
    place = jnp.argmax(mask, axis=-1, keepdims=True)
    return jnp.where(mask.any(-1, keepdims=True), jnp.take_along_axis(x, place, -1), 0)
