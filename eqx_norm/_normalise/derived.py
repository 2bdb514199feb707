"""Attaches derivatives to values, traced only for a program that needs them.

The running statistics of a training step are mostly an auxiliary result. Their derivatives are
then neither traced nor part of the program.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

from .linear import linear_call
from .lowering import Args


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
            return jaxpr_as_fun(ClosedJaxpr(jaxpr.jaxpr, operands[:n]))(*operands[n:])

    derived = DERIVED.bind(*values, *operands, function=flat, n=len(values))
    return eqx.combine(of_value.unflatten(derived), others)


def _derived_jvp(primals: Args, tangents: Args, *, function: Callable[..., Any], n: int) -> Any:
    values, given, along = primals[:n], primals[n:], tangents[n:]
    moving = [i for i, tangent in enumerate(along) if not isinstance(tangent, ad.Zero)]

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
DERIVED = Primitive("eqx_norm_derived")
DERIVED.multiple_results = True
DERIVED.def_impl(lambda *arrays, n, **_: list(arrays[:n]))
DERIVED.def_abstract_eval(lambda *types, n, **_: list(types[:n]))
mlir.register_lowering(DERIVED, lambda context, *arrays, n, **_: arrays[:n])
batching.fancy_primitive_batchers[DERIVED] = _derived_batch
ad.primitive_jvps[DERIVED] = _derived_jvp
