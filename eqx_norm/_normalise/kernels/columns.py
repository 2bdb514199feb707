"""Computes `reference.statistics` of batch norm by a kernel, in one read of x."""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array

from eqx_norm._jax.lowering import Target

from .availability import kernels, platform, refusal


def statistics(
    target: Target, x: Array, mask: Array | None = None, *, shape: Sequence[int]
) -> list[Array]:
    """Computes `reference.statistics` of flattened arrays; raises `ValueError` if the kernel
    does not serve."""
    if mask is not None:
        raise refusal(x, "no kernel takes a mask")
    platform(target, x, {"cuda": "float32 bfloat16 float16"})
    if x.size == 0:
        raise refusal(x, "it is empty")
    return by_columns(kernels("gpu_columns").moments, x, shape=shape)


def by_columns(
    kernel: Callable[[Array], Sequence[Array]], x: Array, *, shape: Sequence[int]
) -> list[Array]:
    """Computes `reference.statistics` by a kernel that takes (ensemble, rows, channels)."""
    # The transpose is free if channels are the last axis in memory, as between convolutions.
    mapped = range(x.ndim - 2)
    kept = [i for i in mapped if shape[i] == x.shape[i]]
    rows = [i for i in mapped if i not in kept]
    ordered = x.transpose(*kept, *rows, x.ndim - 1, x.ndim - 2)
    vectors = kernel(ordered.reshape(math.prod(shape[:-2]), -1, x.shape[-2]))
    count = jnp.full(shape, x.size // math.prod(shape), jnp.float32)
    return [count, *(vector.reshape(shape) for vector in vectors)]
