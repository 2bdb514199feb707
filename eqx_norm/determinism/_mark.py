"""Marks a value in a program by a primitive of JAX that returns its operand.

The JVP of a mark marks the tangent, and the transpose of the tangent's mark the cotangent.
tests/determinism/test_transformations.py checks the primitive.
"""

from collections.abc import Sequence

from jaxtyping import Array, ArrayLike

from eqx_norm._jax import registry
from eqx_norm._jax.jaxprs import JaxprEqn, Literal, Var

Tangent = ArrayLike | registry.Zero


def _jvp(
    primals: Sequence[ArrayLike],
    tangents: Sequence[Tangent],
    *,
    kind: str,
    name: str,
    order: tuple[int, ...],
) -> tuple[Array, Tangent]:
    """Marks value and tangent; the transpose of the tangent's mark marks the cotangent."""
    (x,), (tangent,) = primals, tangents
    if kind == "done":
        raise ValueError(
            "recorded(...) is inside a derivative (jax.grad, jax.jvp, ...), where it would "
            f"miss the cotangent of {name!r}. Put it around the whole step: "
            "jax.jit(recorded(step)), where step takes the gradient."
        )
    y = PROBE.bind(x, kind=kind, name=name, order=order)
    if isinstance(tangent, registry.Zero) or kind == "cotangent":
        return y, tangent
    kind = "recomputed" if kind == "recomputed" else "tangent"
    return y, PROBE.bind(tangent, kind=kind, name=name, order=order)


def _transpose(
    cotangent: Tangent, x: object, *, kind: str, name: str, order: tuple[int, ...]
) -> list[Tangent]:
    if isinstance(cotangent, registry.Zero):
        return [cotangent]
    return [PROBE.bind(cotangent, kind="cotangent", name=name, order=order)]


def _batch(
    axis: object,
    operands: Sequence[ArrayLike],
    places: Sequence[int | None],
    *,
    kind: str,
    name: str,
    order: tuple[int, ...],
) -> tuple[Array, int | None]:
    """Marks the whole batch as one value, whose `order` has the batch axis in front."""
    (x,), (batch,) = operands, places
    if batch is not None:
        others = [axis + 1 if axis >= batch else axis for axis in order]
        order = (batch, *others)
    return PROBE.bind(x, kind=kind, name=name, order=order), batch


def _partial_eval(
    saveable: object,
    unknown: Sequence[bool],
    instantiated: Sequence[bool],
    equation: JaxprEqn,
) -> tuple[JaxprEqn | None, JaxprEqn, list[bool], list[bool], Sequence[Var | Literal]]:
    """Returns the marks for the first and second pass of `remat`, whether the result is unknown
    in each pass, and the residuals, which do not depend on the policy."""
    if unknown[0]:
        return None, equation, [True], [True], []
    again = equation.replace(params={**equation.params, "kind": "recomputed"})
    residuals = [] if instantiated[0] else [*equation.invars]
    return equation, again, [False], [True], residuals


PROBE = registry.primitive(
    "probe", types=lambda x, **_: x, batch=_batch, evaluate=lambda x, **_: x, is_single=True
)
registry.derive(PROBE, jvp=_jvp, transpose=_transpose, remat=_partial_eval)
# Kinds of marks without a row: on a recomputed value, and on a value that already has its row.
WITHOUT_ROW = ("recomputed", "done")
