"""Keeps the activation that a layer was given as a field, and hands it to the operation."""

from typing import Any, cast

import equinox as eqx
import numpy as np
from jax.tree_util import Partial

from eqx_norm._normalise import Activation


def as_tree(activation: Activation | None) -> Activation | None:
    """Returns the activation as a layer's field: a tree, so that it passes through `jax.jit`.

    **Raises:** `ValueError` for what JAX cannot call.
    """
    if isinstance(activation, np.ufunc):
        raise ValueError(
            f"activation={activation!r} is NumPy's and cannot be traced by JAX. Write "
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
    """Returns the activation that `as_tree` was given; a `functools.partial`, which is equal to
    none but itself, as a tree of its parts."""
    if not isinstance(activation, Partial) or activation.args or activation.keywords:
        return activation
    given: Any = activation.func
    if all(hasattr(given, part) for part in ("func", "args", "keywords")):
        return Partial(given.func, *given.args, **given.keywords)
    return given
