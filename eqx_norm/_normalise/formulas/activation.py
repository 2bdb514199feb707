"""Applies activations, and finds out whether a function is elementwise."""

import functools
from collections.abc import Callable

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Inexact

from eqx_norm._jax.jaxprs import (
    COSTLY,
    Jaxpr,
    elementwise_results,
    equations,
    shows_elementwise,
)
from eqx_norm._jax.lowering import Args, automatic_mesh
from eqx_norm.strategies._numbers import cast

from .reference import Shape

Activation = Callable[[Array], Array]


def applied(activation: Activation | None, u: Inexact[Array, "*x"]) -> Inexact[Array, "*x"]:
    """Returns `activation(u)`, cast to the dtype of `u`; raises `ValueError` if the result has
    another shape, and `TypeError` if it is complex and `u` is not."""
    if activation is None:
        return u
    try:
        result = activation(u)
    except Exception as error:  # whatever the user's function raises
        raise _not_elementwise(activation, u, error) from error
    if getattr(result, "shape", None) != u.shape:
        raise _not_elementwise(activation, u, result)
    return cast(f"the result of activation={activation}", result, u.dtype)


def _not_elementwise(activation: Activation, u: Array, result: object) -> ValueError:
    return ValueError(
        f"activation={activation} must be elementwise: given an array of shape {u.shape}, it "
        f"must return one of the same shape, but the result is {result!r}. Apply it after the "
        "layer instead."
    )


class Elementwise:
    """Holds an activation that is elementwise, for arrays of any shape. Two objects are equal
    if the jaxprs of function and derivative, which may have a rule of its own, are equal,
    whatever variables the code has read.

    **Fields:** `derivative`: the jaxpr that computes the tangent of y from u and its tangent.
    """

    def __init__(self, function: Activation, jaxpr: Jaxpr, derivative: Jaxpr):
        self.function, self.jaxpr, self.derivative = function, jaxpr, derivative
        self.key = f"{jaxpr}\n{derivative}"
        self.is_costly = bool(COSTLY & {e.primitive.name for e in equations(jaxpr)})

    def __call__(self, u: Float[Array, "*x"]) -> Float[Array, "*x"]:
        return _called(self, u)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elementwise) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.function)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _called(function: Elementwise, u: Float[Array, "*x"]) -> Float[Array, "*x"]:
    return elementwise_results(function.jaxpr, u)[0]


@_called.defjvp
def _called_jvp(
    function: Elementwise, primals: Args, tangents: Args
) -> tuple[Float[Array, "*x"], Float[Array, "*x"]]:
    (tangent,) = elementwise_results(function.derivative, *primals, *tangents)
    return function(*primals), tangent


def elementwise(activation: Activation, shape: Shape, dtype: DTypeLike) -> Elementwise | None:
    """Returns the activation as an `Elementwise`; `None` if its jaxprs for an array of this
    shape do not show that it is one."""
    u, function = jax.ShapeDtypeStruct(shape, dtype), functools.partial(applied, activation)
    with automatic_mesh():
        try:
            jaxpr = jax.make_jaxpr(function)(u)
            derivative = jax.make_jaxpr(lambda u, du: jax.jvp(function, (u,), (du,))[1])(u, u)
        except Exception:  # as for an array that is split over explicit axes
            return None
    is_elementwise = all(shows_elementwise(j, shape) for j in (jaxpr, derivative))
    return Elementwise(activation, jaxpr, derivative) if is_elementwise else None
