"""Marks a value in a program by a primitive of JAX that returns its operand.

The JVP of a mark marks the tangent, and the transpose of the tangent's mark the cotangent.
tests/determinism/test_transformations.py checks the primitive.
"""

from typing import Any

from eqx_norm._jax import registry


def _jvp(primals: Any, tangents: Any, *, kind: str, **params: Any) -> Any:
    """Marks value and tangent; the transpose of the tangent's mark marks the cotangent."""
    (x,), (tangent,) = primals, tangents
    if kind == "done":
        raise ValueError(
            "recorded(...) is inside a derivative (jax.grad, jax.jvp, ...), where it would "
            f"miss the cotangent of {params['name']!r}. Put it around the whole step: "
            "jax.jit(recorded(step)), where step takes the gradient."
        )
    y = PROBE.bind(x, kind=kind, **params)
    if isinstance(tangent, registry.Zero) or kind == "cotangent":
        return y, tangent
    kind = "recomputed" if kind == "recomputed" else "tangent"
    return y, PROBE.bind(tangent, kind=kind, **params)


def _transpose(cotangent: Any, x: Any, *, kind: str, **params: Any) -> list[Any]:
    if isinstance(cotangent, registry.Zero):
        return [cotangent]
    return [PROBE.bind(cotangent, kind="cotangent", **params)]


def _batch(axis: Any, arrays: Any, dims: Any, *, order: tuple[int, ...], **params: Any) -> Any:
    """Marks the whole batch as one value, whose `order` has the batch axis in front."""
    (x,), (batch,) = arrays, dims
    if batch is None:
        return PROBE.bind(x, order=order, **params), None
    order = (batch, *(axis + (axis >= batch) for axis in order))
    return PROBE.bind(x, order=order, **params), batch


def _partial_eval(saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> Any:
    """Returns the marks for the first and second pass of `remat`, whether the result is unknown
    in each pass, and the residuals, which do not depend on the policy."""
    if unknown[0]:
        return None, equation, [True], [True], []
    again = equation.replace(params={**equation.params, "kind": "recomputed"})
    return equation, again, [False], [True], [] if instantiated[0] else [*equation.invars]


PROBE = registry.primitive(
    "probe", types=lambda x, **_: x, batch=_batch, evaluate=lambda x, **_: x, is_single=True
)
registry.derive(PROBE, jvp=_jvp, transpose=_transpose, remat=_partial_eval)
# Kinds of marks without a row: on a recomputed value, and on a value that already has its row.
WITHOUT_ROW = ("recomputed", "done")
