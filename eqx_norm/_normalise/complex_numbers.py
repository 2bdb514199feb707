"""Computes the moments of complex numbers from those of the real and the imaginary parts."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Complex, Float, Inexact

from eqx_norm.strategies import Moments, Pair

from .formulas.layout import Example


def parts(example: Example) -> Example:
    """Returns the real and imaginary parts, as twice as many groups."""
    x, mask, groups = example.x, example.mask, example.layout.groups
    both = [x.real, x.imag]
    if groups is None:
        axes = tuple(axis + 1 for axis in example.layout.axes)
        return Example.along(jnp.stack(both), axes, None if mask is None else mask[None])
    if groups > 1:  # both parts share a mask of positions
        mask = None if mask is None else mask[0]
        return Example.of(jnp.concatenate(both), mask, groups=2 * groups, channels=2 * groups)
    return Example.of(jnp.stack(both), mask, groups=2, channels=2)


def joined(of_parts: Moments) -> Moments:
    """Returns the moments of complex numbers: m2 is the sum of the m2 of both parts."""
    count = of_parts.known_count
    mean, m2 = Pair(_complex(of_parts.mean_pair.parts)), jnp.add(*jnp.split(of_parts.m2, 2))
    if not isinstance(count, np.floating) and count.ndim > 0:
        count = count[: m2.size]
    return Moments(count, mean, m2)


def concatenated_parts(vector: Inexact[Array, " groups"]) -> Float[Array, " 2*groups"]:
    """Returns the real and the imaginary parts, which are 0 if the vector is real. (For m2,
    only the sum of the two parts matters.)"""
    imaginary = vector.imag if jnp.iscomplexobj(vector) else 0 * vector
    return jnp.concatenate([vector.real, imaginary])


def _complex(both: Float[Array, "*sets parts"]) -> Complex[Array, "*sets groups"]:
    real, imaginary = jnp.split(both, 2, axis=-1)
    return lax.complex(real, imaginary)
