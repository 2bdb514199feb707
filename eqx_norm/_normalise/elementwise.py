"""What is done to each value once it is normalised: an activation, a weight of its own."""

from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array

from . import primitives
from .reference import Activation


class Affine(eqx.Module):
    """`activation(bias + weight * xhat)`, for a weight and a bias of the shape of `xhat`."""

    weight: Array | None
    bias: Array | None
    activation: Activation | None

    def __call__(self, xhat: Array) -> Array:
        y = self._affine(xhat)
        return y if self.activation is None else self.activation(y)

    def _affine(self, xhat: Array) -> Array:
        if self.weight is None:
            return xhat if self.bias is None else xhat + self.bias.astype(xhat.dtype)
        weight = self.weight.astype(xhat.dtype)
        bias = jnp.zeros_like(weight) if self.bias is None else self.bias.astype(xhat.dtype)
        if jnp.iscomplexobj(xhat):
            return bias + weight * xhat
        # The primitive, so that the gradients of both are summed in one pass.
        zero = jnp.zeros((1,) * xhat.ndim, xhat.dtype)
        return primitives.affine(bias, weight, xhat, zero, zero)


def as_tree(activation: Activation | None) -> Activation | None:
    """The same, as a layer's field: without leaves, a function passes through jax.jit, too."""
    is_tree = activation is None or isinstance(activation, eqx.Module | Partial)
    return cast(Any, activation) if is_tree else Partial(activation)


def function(activation: Activation | None) -> Activation | None:
    """What `as_tree` was given."""
    if isinstance(activation, Partial):
        return activation if activation.args or activation.keywords else activation.func
    return activation


def is_pure(activation: Activation, shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Whether it has no arrays of its own, which might have to be differentiated.

    **Raises:** `ValueError` unless it is elementwise: of numbers; or, as its own arrays may
    have a shape to broadcast, of `shape`.
    """
    if not any(eqx.is_array(leaf) for leaf in jax.tree.leaves(activation)):
        one = jax.ShapeDtypeStruct((), dtype)
        _check(activation, one)
        constants = jax.make_jaxpr(activation)(one).consts
        if not any(map(eqx.is_array, constants)):
            return True
    _check(activation, jax.ShapeDtypeStruct(shape, dtype))
    return False


def _check(activation: Activation, given: jax.ShapeDtypeStruct) -> None:
    try:
        result: Any = jax.eval_shape(activation, given)
    except (TypeError, ValueError, IndexError) as error:
        result = error
    if getattr(result, "shape", None) != given.shape:
        raise ValueError(
            f"activation={activation} must be elementwise: given an array of shape "
            f"{given.shape}, it has to return one of the same shape, but here it is "
            f"{result!r}. Apply it after the layer instead."
        )
