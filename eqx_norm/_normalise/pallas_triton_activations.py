"""Which activations a kernel can compute the derivative of."""

from typing import Any

import jax
import jax.numpy as jnp

from .elementwise import CALLS, equations
from .reference import Activation

# Of what activations and their derivatives are made of, what Triton knows. All of it is
# elementwise. (jax 0.10.2 and 0.12.0.1; tests/test_pallas_lowering.py lowers each.)
_NAMES = """
abs add add_any and convert_element_type cos div eq erf exp exp2 expm1 ge gt integer_pow le log
log1p logistic lt max min mul ne neg one_minus_square or pow rsqrt select_n sign sin sqrt square
stop_gradient sub tanh
"""
_KNOWN = frozenset(_NAMES.split())


def unknown(activation: Activation) -> set[str]:
    """What of its derivative Triton does not know, or a kernel cannot hold."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        jaxpr = jax.make_jaxpr(lambda u, g: jax.jvp(activation, (u,), (g,))[1])(scalar, scalar)
    except (TypeError, ValueError) as error:
        return {f"something else than numbers ({error})"}
    arrays = {"arrays of its own"} if jaxpr.consts else set()
    return arrays | (_primitives(jaxpr.jaxpr) - _KNOWN)


def _primitives(jaxpr: Any) -> set[str]:
    found = set()
    for equation in equations(jaxpr):
        if equation.primitive.name not in CALLS:
            found |= {equation.primitive.name, *_dtypes(equation.outvars)}
    return found


def _dtypes(results: Any) -> set[str]:
    """Of half precision and of integers Triton knows less."""
    return {str(result.aval.dtype) for result in results} - {"float32", "bool"}
