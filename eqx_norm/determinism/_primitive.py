"""The probe: a primitive of JAX that returns its operand, and marks it in the program.

Here, in `_stage` and in `_rules`, and only there in this package, JAX's interface for
primitives and for reading programs is used (`jax.extend.core`, `jax.interpreters`, the
parameters of equations), which may change: checked with jax 0.10.2 and 0.12.0.1, and by
tests/test_determinism_transformations.py.
"""

from typing import Any, Literal

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Shaped

# What is marked; "done" marks a value that `recorded` has seen to.
Kind = Literal["forward", "tangent", "cotangent", "done"]

PROBE = Primitive("eqx_norm_probe")


def probe(x: Shaped[Array, "..."], name: str) -> Shaped[Array, "..."]:
    """`x`, marked."""
    return PROBE.bind(x, name=name, kind="forward", order=tuple(range(x.ndim)))


def _jvp(primals: Any, tangents: Any, *, kind: Kind, **how: Any) -> Any:
    """The tangent is marked in turn, and with it, when that is transposed, the cotangent."""
    (x,), (tangent,) = primals, tangents
    y = PROBE.bind(x, kind=kind, **how)
    if kind == "done":
        raise ValueError(
            "recorded(...) stands inside a derivative (jax.grad, jax.jvp, ...), where it would "
            f"miss the cotangent of {how['name']!r}. Put it around the whole step: "
            "jax.jit(recorded(step)), where step takes the gradient."
        )
    if isinstance(tangent, ad.Zero) or kind == "cotangent":
        return y, tangent
    return y, PROBE.bind(tangent, kind="tangent", **how)


def _transpose(cotangent: Any, x: Any, *, kind: Kind, **how: Any) -> list[Any]:
    del x, kind
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [PROBE.bind(cotangent, kind="cotangent", **how)]


def _batch(arrays: Any, axes: Any, *, order: tuple[int, ...], **how: Any) -> Any:
    """The whole batch is one value, and its fingerprint that of the batch axis in front,
    wherever `vmap` has put it: so says `order`, and nothing is moved."""
    (x,), (batch,) = arrays, axes
    order = (batch, *(axis + (axis >= batch) for axis in order))
    return PROBE.bind(x, order=order, **how), batch


PROBE.def_impl(lambda x, **_: x)
PROBE.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(PROBE, lambda context, x, **_: [x])
ad.primitive_jvps[PROBE] = _jvp
ad.primitive_transposes[PROBE] = _transpose
batching.primitive_batchers[PROBE] = _batch
