"""Tells which activations a kernel can compute the derivative of, and in what terms.

All that they are made of is elementwise. (jax 0.10.2 and 0.12.0.1; the tests lower each.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from eqx_norm._normalise.jaxprs import CALLS, equations, evaluated
from eqx_norm._normalise.reference import Activation

# What Triton knows of what activations and their derivatives are made of.
_NAMES = """
abs add add_any and convert_element_type cos div eq erf exp exp2 expm1 ge gt integer_pow le log
log1p logistic lt max min mul ne neg one_minus_square or pow rsqrt select_n sign sin sqrt square
stop_gradient sub tanh
"""
_KNOWN = frozenset(_NAMES.split())


def unknown(activation: Activation, lacking: frozenset[str] = frozenset()) -> set[str]:
    """Returns what a kernel cannot hold or compute of the derivative of an activation.

    It cannot compute what Triton does not know, and what is `lacking`.
    """
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        jaxpr = jax.make_jaxpr(lambda u, g: jax.jvp(activation, (u,), (g,))[1])(scalar, scalar)
    except (TypeError, ValueError) as error:
        return {f"something else than numbers ({error})"}
    found = {"arrays of its own"} if jaxpr.consts else set()
    for equation in equations(jaxpr.jaxpr):
        if equation.primitive.name not in CALLS:
            # Of half precision and of integers Triton knows less.
            dtypes = {str(result.aval.dtype) for result in equation.outvars}
            found |= ({equation.primitive.name} - _KNOWN) | (dtypes - {"float32", "bool"})
            found |= {equation.primitive.name} & lacking
    return found


def _integer_pow(x: Array, *, y: int) -> Array:
    if y < 0:
        return 1 / _integer_pow(x, y=-y)
    return lax.integer_pow(x, y) if y > 1 else x


# What Mosaic GPU does not know, in terms of what it does: not even the `add_any` by which jax
# adds tangents. Results differ by ulps of 1, and not of themselves, but that is what a slope is
# wrong by in any case.
_INSTEAD: dict[str, Callable[..., Any]] = {
    "add_any": lax.add,
    "expm1": lambda x, **_: lax.exp(x) - 1,
    "integer_pow": _integer_pow,
    "log1p": lambda x, **_: lax.log(1 + x),
    "stop_gradient": lambda x, **_: x,
}


def restated(function: Callable[..., Array]) -> Callable[..., Array]:
    """Returns the function of arrays in terms that Mosaic GPU knows."""

    def computed(*arrays: Array) -> Array:
        closed = jax.make_jaxpr(function)(*arrays)
        instead = lambda equation: _INSTEAD.get(equation.primitive.name)  # noqa: E731
        (result,) = evaluated(closed.jaxpr, closed.consts, arrays, instead)
        return result

    return computed
