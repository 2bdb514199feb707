"""Attaches derivatives to values, traced only for a program that needs them.

The running statistics of a training step are mostly an auxiliary result. Their derivatives are
then neither traced nor part of the program.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from eqx_norm._jax import registry
from eqx_norm._jax.jaxprs import called
from eqx_norm._jax.lowering import Args

from .linear import linear_call


def with_derivative(
    function: Callable[..., PyTree], value: PyTree, *given: PyTree, is_lazy: bool
) -> PyTree:
    """Returns the `value` of `function(*given)`, with its derivatives. If `is_lazy`, JAX traces
    `function` only for a program that needs them; it must then contain neither collectives nor
    values of an outer trace. Otherwise such values become operands."""
    floats, others = eqx.partition(value, eqx.is_inexact_array)
    (values, of_value), (operands, of_given) = map(jax.tree.flatten, (floats, given))

    def flat(*operands: Array) -> list[Array]:
        result = function(*of_given.unflatten(operands))
        return jax.tree.leaves(eqx.filter(result, eqx.is_inexact_array))

    if not is_lazy:
        jaxpr = jax.make_jaxpr(flat)(*operands)
        n, operands = len(jaxpr.consts), [*jaxpr.consts, *operands]

        def flat(*operands: Array) -> list[Array]:
            return called(jaxpr, *operands[n:], constants=operands[:n])

    derived = DERIVED.bind(*values, *operands, function=flat, n=len(values))
    return eqx.combine(of_value.unflatten(derived), others)


def _derived_jvp(primals: Args, tangents: Args, *, function: Callable[..., Any], n: int) -> Any:
    values, given, along = primals[:n], primals[n:], tangents[n:]
    moving = [i for i, tangent in enumerate(along) if not isinstance(tangent, registry.Zero)]

    def tangent(along: list[Array], given: list[Array]) -> list[Array]:
        def moved(*at: Array) -> list[Array]:
            places = dict(zip(moving, at, strict=True))
            return function(*(places.get(i, a) for i, a in enumerate(given)))

        return jax.jvp(moved, tuple(given[i] for i in moving), tuple(along))[1]

    types = [*map(jax.typeof, values)]
    d_values = linear_call(tangent, [along[i] for i in moving], given, types=types)
    return DERIVED.bind(*primals, function=function, n=n), d_values


def _derived_batch(
    axis: Any, arrays: Args, places: Args, *, function: Callable[..., Any], n: int
) -> Any:
    if all(place is None for place in places):
        return DERIVED.bind(*arrays, function=function, n=n), [None] * n
    function = jax.vmap(function, tuple(places[n:]), axis_size=axis.size)
    stacked = jax.vmap(lambda *values: values, tuple(places[:n]), axis_size=axis.size)
    values = stacked(*arrays[:n])
    return DERIVED.bind(*values, *arrays[n:], function=function, n=n), [0] * n


# This is a primitive, because JAX drops the rule of a `custom_jvp` from a scan that it
# differentiates in reverse (jax 0.10.2): second derivatives would be those of constants.
DERIVED = registry.primitive(
    "derived",
    types=lambda *types, n, **_: list(types[:n]),
    batch=_derived_batch,
    evaluate=lambda *arrays, n, **_: list(arrays[:n]),
)
registry.derive(DERIVED, jvp=_derived_jvp)
