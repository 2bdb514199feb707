"""Computes `reference.statistics` of batch norm by a kernel, in one read of x."""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from eqx_norm._jax.lowering import Target
from eqx_norm._normalise.formulas.reference import Shape

from .availability import kernels, platform, refusal

_DTYPES = {"cuda": ("float32", "bfloat16", "float16")}
# Given x, (ensemble, rows, channels), returns mean, m2 and mean_lo, (ensemble, 1, channels).
Kernel = Callable[[Array], Sequence[Array]]


def statistics(
    target: Target,
    x: Float[Array, "*mapped channels values"],
    mask: Bool[Array, "..."] | None = None,
    *,
    shape: Shape,
) -> list[Float32[Array, "..."]]:
    """Computes `reference.statistics` of flattened arrays; raises `ValueError` if the kernel
    does not serve."""
    if mask is not None:
        raise refusal(x, "no kernel takes a mask")
    platform(target, x, _DTYPES)
    if x.size == 0:
        raise refusal(x, "it is empty")
    return computed(kernels("gpu_columns").moments, x, shape=shape)


def computed(
    kernel: Kernel, x: Float[Array, "*mapped channels values"], *, shape: Shape
) -> list[Float32[Array, "..."]]:
    """Returns count, mean, m2 and mean_lo of `shape`, computed by a kernel."""
    mapped = range(x.ndim - 2)
    ensemble_axes = [axis for axis in mapped if shape[axis] == x.shape[axis]]
    row_axes = [axis for axis in mapped if shape[axis] != x.shape[axis]]
    # The transpose is free if channels are the last axis in memory, as between convolutions.
    ordered = x.transpose(*ensemble_axes, *row_axes, x.ndim - 1, x.ndim - 2)
    ensemble, channels = math.prod(shape[:-2]), x.shape[-2]
    vectors = kernel(ordered.reshape(ensemble, -1, channels))
    count = jnp.full(shape, x.size // math.prod(shape), jnp.float32)
    return [count, *[vector.reshape(shape) for vector in vectors]]
