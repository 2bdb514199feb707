"""Applies activations, and finds out whether a function is elementwise."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_norm._jax.jaxprs import (
    COSTLY,
    ELEMENTWISE,
    Jaxpr,
    Literal,
    called,
    equations,
    has_constants,
    without_shapes,
)
from eqx_norm._jax.lowering import Aval, automatic_mesh, like

from .reference import Shape

Activation = Callable[[Array], Array]


def applied(activation: Activation | None, u: Array) -> Array:
    """Returns `activation(u)`, cast to the dtype of `u`; raises `ValueError` if the result has
    another shape."""
    if activation is None:
        return u
    try:
        result: Any = activation(u)
    except Exception as error:  # whatever the user's function raises
        result, cause = error, error
    else:
        cause = None
    if getattr(result, "shape", None) != u.shape:
        raise ValueError(
            f"activation={activation} must be elementwise: given an array of shape {u.shape}, "
            f"it must return one of the same shape, but the result is {result!r}. Apply it "
            "after the layer instead."
        ) from cause
    return result.astype(u.dtype)


class Elementwise:
    """Holds an activation whose jaxprs for two shapes show the same elementwise function. Equal
    jaxprs of the function and of its derivative, which may have a rule of its own, make equal
    objects, whatever variables the code has read."""

    def __init__(self, function: Activation, jaxpr: Jaxpr, derivative: Jaxpr):
        self.function, self.key = function, f"{jaxpr}\n{derivative}"
        names = {equation.primitive.name for equation in equations(jaxpr)}
        self.is_costly = bool(COSTLY & names)

    def __call__(self, u: Array) -> Array:
        return applied(self.function, u)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elementwise) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.function)


def elementwise(
    activation: Activation, of: Shape, shape: Shape, dtype: Any = jnp.float32
) -> Elementwise | None:
    """Returns the activation, made for arrays of shape `of`, for arrays of any shape in
    programs that are `lowered`; `None` if the jaxprs for both shapes do not show the same
    elementwise function, or if its derivative has constants."""
    u, function = jax.ShapeDtypeStruct(of, dtype), functools.partial(applied, activation)
    with automatic_mesh():
        try:
            jaxpr = jax.make_jaxpr(function)(u)
            derivative = jax.make_jaxpr(lambda u, du: jax.jvp(function, (u,), (du,)))(u, u)
        except Exception:  # as for an array that is split over explicit axes
            return None
        # A constant would not be in the text that is compared.
        if reshaped(function, jaxpr, u, shape) is None or has_constants(derivative):
            return None
        return Elementwise(activation, jaxpr, derivative)


def reshaped(
    function: Activation, jaxpr: Jaxpr, u: Array | jax.ShapeDtypeStruct, shape: Shape
) -> Activation | None:
    """Returns the function for u in another `shape`, or `None`, as `elementwise` does."""
    other = jaxpr
    if _is_elementwise(jaxpr) and u.shape != shape:
        reshaped = like(u, shape, u.dtype)
        try:
            other = jax.make_jaxpr(lambda u: function(u))(reshaped)
        except Exception:  # whatever the user's function raises
            return None
    if not _is_elementwise(other):
        return None
    if without_shapes(jaxpr) != without_shapes(other):
        return None
    return lambda u: called(other, u)[0]


def _is_elementwise(jaxpr: Jaxpr) -> bool:
    """Returns whether the jaxpr shows that values are computed independently of each other."""
    found, types = list(equations(jaxpr)), cast(Sequence[Aval], jaxpr.in_avals)
    sizes = {1, *(aval.size for aval in types)}
    same_sizes = all(
        v.aval.size in ({1} if isinstance(v, Literal) else sizes)
        for equation in found
        for v in equation.invars
    )
    names = {equation.primitive.name for equation in found}
    return same_sizes and not has_constants(jaxpr) and names <= ELEMENTWISE
