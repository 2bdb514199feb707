"""Reads jaxprs, and computes what they say with other functions in place of some primitives."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import Literal
from jaxtyping import Array

CALLS = frozenset(("jit", "pjit", "custom_jvp_call", "remat2", "checkpoint", "closed_call"))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and after each call those of what is called."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name in CALLS:
            yield from equations(_called(equation)[0])


def evaluated(
    jaxpr: Any,
    constants: Sequence[Any],
    arrays: Sequence[Any],
    instead: Callable[[Any], Callable[..., Array] | None],
    calls: frozenset[str] = CALLS,
) -> list[Any]:
    """Returns the results of a jaxpr, also of what its `calls` call.

    Where `instead` returns a function for an equation, that is computed, and not its primitive.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arrays], strict=True))

    def read(atoms: Any) -> list[Any]:
        return [a.val if isinstance(a, Literal) else values[a] for a in atoms]

    for equation in jaxpr.eqns:
        inputs, primitive = read(equation.invars), equation.primitive
        if primitive.name in calls:
            results = evaluated(*_called(equation), inputs, instead, calls)
        elif (function := instead(equation)) is not None:
            results = [function(*inputs, **equation.params)]
        else:
            results = primitive.bind(*inputs, **primitive.get_bind_params(equation.params))
            results = results if primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


def _called(equation: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the jaxpr that a call evaluates, and its constants."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
