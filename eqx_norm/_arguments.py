"""Checks arguments that `BatchNorm` and `LayerNorm` have in common."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

# The derivative of 1 / sqrt(variance + eps) is as large as eps**-1.5: of the 38 decades that
# float32 has, that leaves 8 for what it is multiplied with.
_LEAST_EPS = 1e-20


def checked_eps(eps: float) -> float:
    """Returns `eps`; raises `ValueError` if it is too small."""
    if not eps >= _LEAST_EPS:
        raise ValueError(
            f"eps={eps!r}: what has variance 0 is divided by sqrt(eps), and its gradients by a "
            f"power of that, so eps must be at least {_LEAST_EPS}, for example 1e-5."
        )
    return float(eps)


def weight_dtype(dtype: DTypeLike | None) -> jnp.dtype:
    """Returns the dtype of weight and bias: the one given, or the default float dtype."""
    dtype = jnp.result_type(float) if dtype is None else jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"dtype={dtype}: weight and bias are trained, so it must be a float or complex "
            "dtype, for example jnp.float32."
        )
    return dtype


def check_inexact(x: Array) -> None:
    """Raises `TypeError` unless `x` is float or complex."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f"x has dtype {x.dtype}, whose normalised values cannot be represented. "
            "Write x.astype(jnp.float32)."
        )
