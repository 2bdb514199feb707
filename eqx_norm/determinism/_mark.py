"""Marks a value in a program by a primitive of JAX that returns its operand.

The JVP of a mark marks the tangent, and the transpose of the tangent's mark the cotangent. The
primitive depends on `jax.extend.core` and `jax.interpreters`, which may change:
tests/determinism/test_transformations.py checks the primitive.
"""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

PROBE = Primitive("eqx_norm_probe")


def _jvp(primals: Any, tangents: Any, *, kind: str, **rest: Any) -> Any:
    """Marks value and tangent; the transpose of the tangent's mark marks the cotangent."""
    (x,), (tangent,) = primals, tangents
    if kind == "done":
        raise ValueError(
            "recorded(...) is inside a derivative (jax.grad, jax.jvp, ...), where it would "
            f"miss the cotangent of {rest['name']!r}. Put it around the whole step: "
            "jax.jit(recorded(step)), where step takes the gradient."
        )
    y = PROBE.bind(x, kind=kind, **rest)
    if isinstance(tangent, ad.Zero) or kind == "cotangent":
        return y, tangent
    kind = "recomputed" if kind == "recomputed" else "tangent"
    return y, PROBE.bind(tangent, kind=kind, **rest)


def _transpose(cotangent: Any, x: Any, *, kind: str, **rest: Any) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [PROBE.bind(cotangent, kind="cotangent", **rest)]


def _batch(arrays: Any, axes: Any, *, order: tuple[int, ...], **rest: Any) -> Any:
    """Marks the whole batch as one value, whose `order` has the batch axis in front."""
    (x,), (batch,) = arrays, axes
    order = (batch, *(axis + (axis >= batch) for axis in order))
    return PROBE.bind(x, order=order, **rest), batch


def _partial_eval(saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> Any:
    """Returns the marks for the first and second pass of `remat`, whether the result is unknown
    in each pass, and the residuals, which do not depend on the policy."""
    if unknown[0]:
        return None, equation, [True], [True], []
    again = equation.replace(params={**equation.params, "kind": "recomputed"})
    return equation, again, [False], [True], [] if instantiated[0] else [*equation.invars]


PROBE.def_impl(lambda x, **_: x)
PROBE.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(PROBE, lambda context, x, **_: [x])
ad.primitive_jvps[PROBE] = _jvp
ad.primitive_transposes[PROBE] = _transpose
batching.primitive_batchers[PROBE] = _batch
partial_eval.partial_eval_jaxpr_custom_rules[PROBE] = _partial_eval
# Kinds of marks without a row: on a recomputed value, and on a value that already has its row.
WITHOUT_ROW = ("recomputed", "done")
