"""Makes primitives of JAX and registers their rules: the one place that knows its registries.

Checked with jax 0.10.2, 0.11.2 and 0.12.0.1. A rule takes operands, tangents, cotangents and
places of mapped axes as JAX hands them over; `Zero` and `is_undefined_primal` describe them.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol, runtime_checkable

from jax.extend.core import Primitive as Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

Zero = ad.Zero  # a tangent or cotangent that is known to be 0
instantiate_zeros = ad.instantiate_zeros
is_undefined_primal = ad.is_undefined_primal  # of an operand that a transpose is taken in
Rule = Callable[..., Any]


@runtime_checkable
class MappedAxis(Protocol):
    """Describes the axis of a `vmap` to the rules of batching."""

    name: Hashable
    size: int


def primitive(
    name: str,
    *,
    types: Rule,
    batch: Rule,
    evaluate: Rule,
    lower: Mapping[str | None, Rule] | None = None,
    is_single: bool = False,
) -> Primitive:
    """Returns a new primitive.

    **Arguments:**

    - `types`: returns the types of the results, given the types of the operands.
    - `batch`: the rule of `vmap`: given the axis, the operands and the places of their mapped
        axes, returns results and places.
    - `evaluate`: computes the results outside of `jit`.
    - `lower`: by platform, `None` for all others, the rule that lowers the primitive; by
        default the operations of `evaluate`.
    - `is_single`: whether rules return one result, and not a list.
    """
    made = Primitive(f"eqx_norm_{name}")
    made.multiple_results = not is_single
    made.def_impl(evaluate)
    made.def_abstract_eval(types)
    batching.fancy_primitive_batchers[made] = batch
    for platform, rule in (lower or {None: mlir.lower_fun(evaluate, not is_single)}).items():
        mlir.register_lowering(made, rule, platform)
    return made


def derive(
    made: Primitive,
    *,
    jvp: Rule | None = None,
    transpose: Rule | None = None,
    remat: Rule | None = None,
) -> None:
    """Registers the rules of derivatives, and of `jax.checkpoint`."""
    if jvp is not None:
        ad.primitive_jvps[made] = jvp
    if transpose is not None:
        ad.primitive_transposes[made] = transpose
    if remat is not None:
        partial_eval.partial_eval_jaxpr_custom_rules[made] = remat


def derive_linear(made: Primitive, transpose: Rule) -> None:
    """Registers the rules of a primitive that is linear in its one operand."""
    ad.deflinear2(made, transpose)
