"""Defines norms by their formulas, as in models that use no layer of a library."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array


class LayerNormByHand(eqx.Module):
    """Applies a layer norm of vectors, by its formula."""

    weight: Array
    bias: Array

    def __init__(self, size: int):
        self.weight, self.bias = jnp.ones(size), jnp.zeros(size)

    def __call__(self, x: Array) -> Array:
        mean, variance = x.mean(), x.var()
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * self.weight + self.bias


class RMSNormByHand(eqx.Module):
    """Applies an RMS norm of vectors, by its formula."""

    weight: Array

    def __init__(self, size: int):
        self.weight = jnp.ones(size)

    def __call__(self, x: Array) -> Array:
        return x * jax.lax.rsqrt((x * x).mean() + 1e-5) * self.weight
