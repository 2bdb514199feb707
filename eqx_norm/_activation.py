"""Converts an activation to a field of a layer, and back to a callable."""

from typing import Any, cast

import equinox as eqx
import numpy as np
from jax.tree_util import Partial

from eqx_norm._normalise import Activation


def as_tree(activation: Activation | None) -> Activation | None:
    """Returns the activation as a pytree, which can be passed through `jax.jit`; raises
    `ValueError` for a NumPy function and for an object that is not callable."""
    if isinstance(activation, np.ufunc):
        raise ValueError(
            f"activation={activation!r} is a NumPy function, which JAX cannot trace. Write "
            f"activation=jax.numpy.{activation.__name__}."
        )
    if activation is not None and not callable(activation):
        raise ValueError(
            f"activation={activation!r} cannot be called. Give the function itself, for "
            "example activation=jax.nn.relu."
        )
    is_tree = activation is None or isinstance(activation, eqx.Module | Partial)
    return cast(Any, activation) if is_tree else Partial(activation)


def as_callable(activation: Activation | None) -> Activation | None:
    """Returns the activation given to `as_tree`; a `functools.partial`, which equals only
    itself, as a `Partial`."""
    if not isinstance(activation, Partial) or activation.args or activation.keywords:
        return activation
    given: Any = activation.func
    if all(hasattr(given, part) for part in ("func", "args", "keywords")):
        return Partial(given.func, *given.args, **given.keywords)
    return given
