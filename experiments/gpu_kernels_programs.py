"""Programs around the kernels: a normalisation forward and backward, and between convolutions.

They are the layer's arithmetic without its state, on `x` of (*ensemble, examples, channels,
values); by the kernels of either backend, and by XLA alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from eqx_norm._normalise import reference
from eqx_norm._normalise.gpu.choice import rest_before_m2
from eqx_norm._normalise.gpu.mosaic import BACKEND as MOSAIC_BACKEND
from eqx_norm._normalise.gpu.triton import BACKEND as TRITON_BACKEND

EPS = 1e-5


class Passes(NamedTuple):
    """The two passes that sum over x."""

    statistics: Callable[..., Any]
    pulled_sums: Callable[..., Any]


def _xla_statistics(x: Array) -> tuple[Array, ...]:
    count, mean, m2, rest = reference.statistics(x)
    return count, mean, rest, m2


def _xla_pulled_sums(activation: Any, g: Array, *inner: Array) -> tuple[Array, Array]:
    a, b, x, mean, rest = inner
    g = g.astype(mean.dtype)
    if activation is not None:
        g = reference.slope(activation, g, a, b, x, mean, rest)
    return reference.sums(g, x, mean, rest, shape=mean.shape)


TRITON, MOSAIC, XLA = "pallas_triton", "pallas_mosaic", "xla"
PASSES = {
    TRITON: Passes(pallas_triton.statistics, pallas_triton.pulled_sums),
    MOSAIC: Passes(pallas_mosaic.statistics, pallas_mosaic.pulled_sums),
    XLA: Passes(_xla_statistics, _xla_pulled_sums),
}


def forward(passes: Passes, activation: Any, x: Array, weight: Array, bias: Array) -> Any:
    """y, and what the backward pass needs. The least: x for the statistics, x and y."""
    count, mean, rest, m2 = (v[..., None, :, None] for v in passes.statistics(x))
    scale = weight * lax.rsqrt(m2 / count + EPS)
    if activation is None:
        y = reference.affine(bias, scale, x, mean, rest)
    else:
        y = reference.activated(activation, bias, scale, x, mean, rest)
    return y.astype(x.dtype), (mean, rest, m2, scale)


def backward(
    passes: Passes,
    activation: Any,
    g: Array,
    x: Array,
    bias: Array,
    kept: tuple[Array, Array, Array, Array],
) -> Any:
    """dx, and of both parameters. The least: x and g for the sums, x, g and dx."""
    mean, rest, m2, scale = kept
    sum_g, sum_gd = passes.pulled_sums(activation, g, bias, scale, x, mean, rest)
    # As if XLA had not seen them before: see primitives.RECOMPUTE_BARRIER.
    bias, scale, mean, rest, sum_g, sum_gd = lax.optimization_barrier(
        (bias, scale, mean, rest, sum_g, sum_gd)
    )
    wide = g.astype(mean.dtype)
    if activation is not None:
        wide = reference.slope(activation, wide, bias, scale, x, mean, rest)
    n = x.shape[-3] * x.shape[-1]
    slope = scale * sum_gd / (m2 + EPS * n)
    dx = scale * wide - reference.affine(scale * sum_g / n, slope, x, mean, rest)
    return dx.astype(x.dtype), sum_g, sum_gd


def between(passes: Passes | None, u: Array, v: Array, kernel: Array, vector: Array) -> Any:
    """A convolution, norm and ReLU, a convolution; and back, for v from above.

    Without `passes`, no norm.
    """

    def convolve(array: Array) -> Array:
        return lax.conv_general_dilated(array, kernel, (1, 1), "SAME")

    image = convolve(u)
    x, g = (array.reshape(*array.shape[:2], -1) for array in (image, convolve(v)))
    if passes is None:
        y, dx = jax.nn.relu(x), jnp.where(x > 0, g, 0)
    else:
        y, kept = forward(passes, jax.nn.relu, x, vector, vector)
        dx, _, _ = backward(passes, jax.nn.relu, g, x, vector, kept)
    return tuple(convolve(array.reshape(image.shape)) for array in (y, dx))
