"""Marks values in a program, and evaluates a program with the fingerprint of each mark.

A mark is a primitive of JAX that returns its operand. Its derivative marks the tangent, and the
transpose of that marks the cotangent. `stage` evaluates a traced program equation by equation;
it rebuilds an equation with a program inside (`scan`, `cond`, ...) with JAX's public function,
around the inside as evaluated here.

It depends on internals of JAX that may change: `jax.extend.core`, `jax.interpreters`, and the
names and parameters of equations. tests/determinism/test_transformations.py checks them.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ._fingerprint import of_array

PROBE = Primitive("eqx_norm_probe")


def _jvp(primals: Any, tangents: Any, *, kind: str, **rest: Any) -> Any:
    """Marks the tangent, too; the transpose of that mark marks the cotangent."""
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
    in each, and what is saved, whatever the policy."""
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
# Marks without a row: on a value recomputed for a derivative, and on one that has its row.
_WITHOUT_ROW = ("recomputed", "done")


class Probe(NamedTuple):
    """Describes a row: one pass of a probe."""

    name: str
    kind: str  # "forward", "tangent" or "cotangent"
    shape: tuple[int, ...]  # of the whole value
    dtype: str
    axes: tuple[str, ...]  # the mesh axes over which `shard_map` splits the value
    iteration: tuple[int, ...] = ()  # of each loop around it


# In the order of the program.
Plan = tuple[Probe, ...]


class Results(NamedTuple):
    """Holds the outputs of a part of a program, its rows, and its values if they are kept."""

    outputs: list[Any]
    rows: Any = np.zeros((0, 2), np.uint32)
    values: Any = ()


class Staged(NamedTuple):
    """Holds the plan of the rows of a part of a program, and the function that runs it."""

    plan: Plan
    run: Callable[..., Results]


class Context(NamedTuple):
    """Describes what is around an equation."""

    keep_values: bool
    mesh_axes: tuple[tuple[str, int], ...] = ()  # name and size, of each `shard_map`
    check_vma: bool = True  # whether JAX tracks over which of these a value varies


def stage(jaxpr: Any, context: Context) -> Staged:
    """Returns the plan of a program's rows, and a function that computes them."""
    constants, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
    parts = [(equation, _stage_equation(equation, context)) for equation in jaxpr.eqns]

    def run(*arguments: Any) -> Results:
        known = dict(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))
        rows, values = [], ()

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for equation, part in parts:
            with equation.ctx.manager:
                results = part.run(*map(read, equation.invars))
            known.update(zip(equation.outvars, results.outputs, strict=True))
            if part.plan:
                rows.append(results.rows)
                values += results.values
        outputs = [_array(read(atom), atom.aval) for atom in jaxpr.outvars]
        return Results(outputs, jnp.concatenate(rows), values) if rows else Results(outputs)

    return Staged(tuple(probe for _, part in parts for probe in part.plan), run)


def _stage_equation(equation: Any, context: Context) -> Staged:
    primitive, params = equation.primitive, equation.params
    if primitive is PROBE and params["kind"] not in _WITHOUT_ROW:
        return _stage_probe(equation, context)
    if rule := _RULES.get(primitive.name):
        if (staged := rule(equation, params, context)).plan:
            return staged
    elif hidden := next(_names_in(equation), None):
        raise NotImplementedError(
            f"monitor(..., {hidden!r}) is in a {primitive.name!r}, and recorded(...) cannot "
            "look inside. Monitor its arguments and result instead; use lax.scan in place of a "
            "loop whose length is not known while tracing (lax.while_loop, or lax.fori_loop "
            "with traced bounds)."
        )

    def run(*arguments: Any) -> Results:
        outputs = primitive.bind(*arguments, **primitive.get_bind_params(params))
        return Results(outputs if primitive.multiple_results else [outputs])

    return Staged((), run)


def _array(x: Any, aval: Any) -> Array:
    """Returns a value, which may be a Python or NumPy literal, as an array."""
    dtype = None if aval.weak_type else aval.dtype
    return x if isinstance(x, Array) else jnp.asarray(x, dtype)


def _stage_probe(equation: Any, context: Context) -> Staged:
    name, kind, order = (equation.params[key] for key in ("name", "kind", "order"))
    aval = equation.invars[0].aval
    sizes = dict(context.mesh_axes)
    varying = aval.manual_axis_type.varying if context.check_vma else sizes
    axes = tuple(axis for axis in sizes if axis in varying)
    others = tuple(axis for axis in sizes if axis not in varying)
    shape = tuple(aval.shape[axis] for axis in order)
    if axes:
        first, *rest = shape or (1,)
        shape = (first * math.prod(sizes[axis] for axis in axes), *rest)

    def run(x: Any) -> Results:
        x = _array(x, aval)
        row = of_array(x, order, lax.axis_index(axes).astype(jnp.uint32) if axes else None)
        if others:
            # Equal on several devices: only one counts, because `shard_map` sums the rows.
            row = jnp.where(lax.axis_index(others) == 0, row, jnp.zeros_like(row))
        y = PROBE.bind(x, name=name, kind="done", order=order)
        x = x.transpose(order)
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        # Parts are concatenated along an axis, so they need one.
        value = jnp.atleast_1d(x) if axes else x
        return Results([y], row[None], (value,) if context.keep_values else ())

    return Staged((Probe(name, kind, shape, str(aval.dtype), axes),), run)


def _names_in(equation: Any) -> Iterator[str]:
    for jaxpr in jaxprs_in_params(equation.params):
        for inner in jaxpr.eqns:
            if inner.primitive is PROBE and inner.params["kind"] not in _WITHOUT_ROW:
                yield inner.params["name"]
            yield from _names_in(inner)


# --- Programs inside of an equation.


def _inline(equation: Any, params: Any, context: Context) -> Staged:
    return stage(params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"], context)


def _jit(equation: Any, params: Any, context: Context) -> Staged:
    inside = stage(params["jaxpr"], context)

    def constrained(x: Any, sharding: Any) -> Any:
        is_known = isinstance(sharding, jax.sharding.Sharding)
        return lax.with_sharding_constraint(x, sharding) if is_known else x

    def run(*arguments: Any) -> Results:
        results = inside.run(*map(constrained, arguments, params["in_shardings"]))
        outputs = map(constrained, results.outputs, params["out_shardings"])
        return results._replace(outputs=[*outputs])

    return Staged(inside.plan, run)


def _checkpoint(equation: Any, params: Any, context: Context) -> Staged:
    inside = stage(params["jaxpr"], context)

    def run(*arguments: Any) -> Results:
        # Keeps XLA from reusing the results of the first pass.
        is_barred = params["differentiated"] and params["prevent_cse"]
        return inside.run(*(lax.optimization_barrier(arguments) if is_barred else arguments))

    return Staged(inside.plan, run)


def _scan(equation: Any, params: Any, context: Context) -> Staged:
    inside = stage(params["jaxpr"], context)

    def count(outside: Any, avals: Any) -> int:
        """Returns how many are scanned: those with one more axis outside than inside."""
        return sum(x.aval.ndim != a.ndim for x, a in zip(outside, avals, strict=True))

    carries = len(equation.outvars) - count(equation.outvars, params["jaxpr"].out_avals)
    scanned = count(equation.invars, params["jaxpr"].in_avals)
    constants = len(equation.invars) - carries - scanned

    def run(*arguments: Any) -> Results:
        fixed, looped = arguments[:constants], [*arguments[constants:]]

        def body(carry: Any, xs: Any) -> Any:
            outputs, rows, values = inside.run(*fixed, *carry, *xs)
            return outputs[:carries], (outputs[carries:], rows, values)

        carry, (ys, rows, values) = lax.scan(
            body,
            looped[:carries],
            looped[carries:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        rows = rows[::-1] if params["reverse"] else rows
        values = tuple(stack[i] for i in order for stack in values)
        return Results([*carry, *ys], rows.reshape(-1, 2), values)

    order = range(params["length"])[:: -1 if params["reverse"] else 1]  # of execution
    plan = [p._replace(iteration=(i, *p.iteration)) for i in order for p in inside.plan]
    return Staged(tuple(plan), run)


def _cond(equation: Any, params: Any, context: Context) -> Staged:
    branches = [stage(branch, context) for branch in params["branches"]]

    def run(index: Array, *operands: Any) -> Results:
        # Rows of a branch that is not taken have two sums of 0; those of a value have them with
        # a probability of 2**-64.
        shapes = [jax.eval_shape(branch.run, *operands)[1:] for branch in branches]

        def take(i: int, *operands: Any) -> Results:
            seen = jax.tree.map(jnp.zeros_like, shapes)
            outputs, *seen[i] = branches[i].run(*operands)
            rows, values = zip(*seen, strict=True)
            return Results(outputs, jnp.concatenate(rows), sum(values, ()))

        chosen = [functools.partial(take, i) for i in range(len(branches))]
        return lax.switch(index, chosen, *operands)

    return Staged(sum((branch.plan for branch in branches), ()), run)


def _shard_map(equation: Any, params: Any, context: Context) -> Staged:
    mesh, manual, check_vma = (params[k] for k in ("mesh", "newly_manual_axes", "check_vma"))
    sizes = {axis: mesh.shape[axis] for axis in mesh.axis_names if axis in manual}
    all_axes = (*context.mesh_axes, *sizes.items())
    inside = stage(params["jaxpr"], context._replace(mesh_axes=all_axes, check_vma=check_vma))
    # Split values are concatenated along the first axis.
    cut = [
        PartitionSpec(tuple(axis for axis in probe.axes if axis in sizes))
        for probe in (inside.plan if context.keep_values else ())
    ]

    def body(*arguments: Any) -> Results:
        results = inside.run(*arguments)
        # The only communication that the probes need: all rows in one sum.
        return results._replace(rows=lax.psum(results.rows, tuple(sizes)))

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=Results([*params["out_specs"]], PartitionSpec(), tuple(cut)),
        axis_names=set(manual),
        check_vma=check_vma,
    )
    return Staged(inside.plan, run)


# By the names of primitives.
_RULES = {
    **dict.fromkeys(("closed_call", "core_call", "eval_jaxpr"), _inline),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _inline),
    **dict.fromkeys(("remat2", "checkpoint"), _checkpoint),
    **{"jit": _jit, "scan": _scan, "cond": _cond, "shard_map": _shard_map},
}
