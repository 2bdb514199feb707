"""Checks an activation, stored in a layer as in `eqx.nn.MLP`, and makes it comparable."""

import functools

import numpy as np
from jax.tree_util import Partial

from eqx_norm._normalise import Activation


def checked(activation: Activation | None) -> Activation | None:
    """Returns the activation; raises `ValueError` for a NumPy function, and for an object that
    is not callable."""
    if activation is not None and (
        isinstance(activation, np.ufunc) or not callable(activation)
    ):
        raise ValueError(
            f"activation={activation!r} is no function that JAX can trace. Give the function "
            "itself, and JAX's, not NumPy's: for example activation=jax.numpy.tanh."
        )
    return activation


def comparable(activation: Activation | None) -> Activation | None:
    """Returns the activation. Converts a `functools.partial`, which equals only itself, to a
    `Partial`, a pytree with the arguments as leaves."""
    if isinstance(activation, functools.partial):
        return Partial(activation.func, *activation.args, **activation.keywords)
    return activation
