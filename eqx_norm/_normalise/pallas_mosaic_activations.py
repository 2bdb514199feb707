"""The derivatives of activations, in what Mosaic GPU knows.

It knows less than Triton: not even the `add_any` by which jax adds tangents. So a function is
traced, and what was found is computed again with something else in the place of what Mosaic
lacks. (jax 0.12.0.1; tests/test_pallas_mosaic.py lowers each.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from . import pallas_triton_activations
from .reference import Activation


def _integer_pow(x: Array, *, y: int) -> Array:
    if y < 0:
        return 1 / _integer_pow(x, y=-y)
    return lax.integer_pow(x, y) if y > 1 else x


# By ulps of 1 and not of the result, which is what a slope is wrong by in any case.
_INSTEAD: dict[str, Callable[..., Any]] = {
    "add_any": lax.add,
    "expm1": lambda x: lax.exp(x) - 1,
    "integer_pow": _integer_pow,
    "log1p": lambda x: lax.log(1 + x),
    "stop_gradient": lambda x: x,
}
# There is nothing as good for it.
_LACKING = frozenset(("pow",))


def known(function: Callable[..., Array]) -> Callable[..., Array]:
    """Returns the function of arrays, in words that Mosaic GPU knows."""

    def in_other_words(*arrays: Array) -> Array:
        closed = jax.make_jaxpr(function)(*arrays)
        (result,) = _computed(closed.jaxpr, closed.consts, arrays)
        return result

    return in_other_words


def unknown(activation: Activation) -> set[str]:
    """What of its derivative Mosaic does not know, or a kernel cannot hold."""
    found = pallas_triton_activations.unknown(activation)
    if found:
        return found
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    derivative = known(lambda u, g: jax.jvp(activation, (u,), (g,))[1])
    equations = jax.make_jaxpr(derivative)(scalar, scalar).jaxpr.eqns
    return {equation.primitive.name for equation in equations} & _LACKING


def _computed(jaxpr: Any, constants: Any, arrays: Any) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arrays], strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax.extend.core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        name, given = equation.primitive.name, [value(atom) for atom in equation.invars]
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if inner is not None:
            results = _computed(
                getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given
            )
        elif name in _INSTEAD:
            parameters = {"y": equation.params["y"]} if name == "integer_pow" else {}
            results = [_INSTEAD[name](*given, **parameters)]
        else:
            result = equation.primitive.bind(*given, **equation.params)
            results = result if equation.primitive.multiple_results else [result]
        values |= zip(equation.outvars, results, strict=True)
    return [value(atom) for atom in jaxpr.outvars]
