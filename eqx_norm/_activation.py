"""Converts an activation to a field of a layer, and back to a callable."""

from typing import Any, cast

import equinox as eqx
import numpy as np
from jax.tree_util import Partial

from eqx_norm._normalise import Activation


def as_tree(activation: Activation | None) -> Activation | None:
    """Returns the activation as a pytree, which can be passed through `jax.jit`; raises
    `ValueError` for a NumPy function and for an object that is not callable."""
    if activation is not None and (
        isinstance(activation, np.ufunc) or not callable(activation)
    ):
        raise ValueError(
            f"activation={activation!r} is no function that JAX can trace. Give the function "
            "itself, and JAX's, not NumPy's: for example activation=jax.numpy.tanh."
        )
    is_tree = activation is None or isinstance(activation, eqx.Module | Partial)
    return cast(Any, activation) if is_tree else Partial(activation)


def as_callable(activation: Activation | None) -> Activation | None:
    """Returns the activation given to `as_tree`; a `functools.partial`, which equals only
    itself, as a `Partial`."""
    if not isinstance(activation, Partial) or activation.args or activation.keywords:
        return activation
    function: Any = activation.func
    if all(hasattr(function, part) for part in ("func", "args", "keywords")):
        return Partial(function.func, *function.args, **function.keywords)
    return function
