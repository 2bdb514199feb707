"""Marks values in a program, and evaluates a program with the fingerprint of each mark.

A mark is a primitive of JAX that returns its operand: an equation of the traced program, whose
derivative is a mark on the tangent, and the transpose of that a mark on the cotangent. `stage`
evaluates a program equation by equation; an equation with a program inside of it is built anew
by the public function that the user wrote it with, around the inside as evaluated here.

All that this package knows of JAX's insides is in this file: `jax.extend.core`,
`jax.interpreters`, and the names and parameters of equations, which may change. Checked with
jax 0.10.2 and 0.12.0.1, by tests/determinism/test_transformations.py.
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
    """Marks the tangent too. Transposed, that mark is one on the cotangent."""
    (x,), (tangent,) = primals, tangents
    if kind == "done":
        raise ValueError(
            "recorded(...) stands inside a derivative (jax.grad, jax.jvp, ...), where it would "
            f"miss the cotangent of {rest['name']!r}. Put it around the whole step: "
            "jax.jit(recorded(step)), where step takes the gradient."
        )
    y = PROBE.bind(x, kind=kind, **rest)
    if isinstance(tangent, ad.Zero) or kind == "cotangent":
        return y, tangent
    kind = "recomputed" if kind == "recomputed" else "tangent"
    return y, PROBE.bind(tangent, kind=kind, **rest)


def _transpose(cotangent: Any, x: Any, **given: Any) -> list[Any]:
    is_zero = isinstance(cotangent, ad.Zero)
    return [cotangent if is_zero else PROBE.bind(cotangent, **{**given, "kind": "cotangent"})]


def _batch(arrays: Any, axes: Any, *, order: tuple[int, ...], **rest: Any) -> Any:
    """Marks the whole batch as one value, whose `order` has the batch axis in front."""
    (x,), (batch,) = arrays, axes
    order = (batch, *(axis + (axis >= batch) for axis in order))
    return PROBE.bind(x, order=order, **rest), batch


def _partial_eval(saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> Any:
    """Returns the marks of `remat` in its first pass and its second, whether the result is
    unknown in the first and in the second, and what is saved, whatever the policy says."""
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
# The kinds of marks that give no row: that of a value which is computed again for a derivative,
# and that of one whose row has been taken.
_WITHOUT_ROW = ("recomputed", "done")


class Probe(NamedTuple):
    """Says what gives a row: a probe each time that it is passed."""

    name: str
    kind: str  # "forward", "tangent" or "cotangent"
    shape: tuple[int, ...]  # of the whole value
    dtype: str
    axes: tuple[str, ...]  # of the meshes over which the value is cut up, by `shard_map`
    iteration: tuple[int, ...] = ()  # of each loop around it


# In the order of the rows, which is that of the program.
Plan = tuple[Probe, ...]


class Results(NamedTuple):
    """Holds what a part of a program returns, its rows, and, if they are kept, its values."""

    outputs: list[Any]
    rows: Any = np.zeros((0, 2), np.uint32)
    values: Any = ()


class Staged(NamedTuple):
    """Says which rows a part of a program gives, and evaluates it."""

    plan: Plan
    run: Callable[..., Results]


class Context(NamedTuple):
    """Says where in the program an equation stands."""

    keep_values: bool
    mesh_axes: tuple[tuple[str, int], ...] = ()  # of each `shard_map` around: name and size
    check_vma: bool = True  # whether JAX knows over which of these a value varies
    is_repeated: bool = False  # whether values are computed again, by `jax_remat3`


def stage(jaxpr: Any, context: Context) -> Staged:
    """Returns the plan of a program's rows, and the program that gives them."""
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
    primitive = equation.primitive
    if "rematted_computation" in str(equation.source_info.name_stack):
        context = context._replace(is_repeated=True)  # there is no other sign of it
    if primitive is PROBE:
        return _stage_probe(equation, context)
    name, params = _described(equation)
    if name in _RULES:
        if (staged := _RULES[name](equation, params, context)).plan:
            return staged
    elif hidden := next(_names_in(equation), None):
        raise NotImplementedError(
            f"monitor(..., {hidden!r}) stands in a {name!r}, inside of which recorded(...) "
            "cannot see. Monitor its arguments and its result instead; in place of a loop that "
            "runs for a number of times which is not known beforehand (lax.while_loop, or "
            "lax.fori_loop with traced bounds) use lax.scan."
        )

    def run(*arguments: Any) -> Results:
        outputs = primitive.bind(*arguments, **primitive.get_bind_params(equation.params))
        return Results(outputs if primitive.multiple_results else [outputs])

    return Staged((), run)


def _described(equation: Any) -> tuple[str, dict[str, Any]]:
    """Returns a primitive's name and parameters; those of `jax_remat3` are in an object."""
    known = equation.params.get("_prim")
    found = (type(known).__name__, known.params) if known else None
    return found or (equation.primitive.name, equation.params)


def _array(x: Any, aval: Any) -> Array:
    """Returns a literal, which may be a number of Python's or NumPy's, as an array."""
    dtype = None if aval.weak_type else aval.dtype
    return x if isinstance(x, Array) else jnp.asarray(x, dtype)


def _stage_probe(equation: Any, context: Context) -> Staged:
    name, kind, order = (equation.params[key] for key in ("name", "kind", "order"))
    if kind in _WITHOUT_ROW or (context.is_repeated and kind != "cotangent"):
        return Staged((), lambda x: Results([x]))
    aval = equation.invars[0].aval
    sizes = dict(context.mesh_axes)
    varying = aval.manual_axis_type.varying if context.check_vma else sizes
    axes, others = (tuple(a for a in sizes if (a in varying) is of) for of in (True, False))
    shape = tuple(aval.shape[axis] for axis in order)
    if axes:
        first, *rest = shape or (1,)
        shape = (first * math.prod(sizes[axis] for axis in axes), *rest)

    def run(x: Any) -> Results:
        x = _array(x, aval)
        row = of_array(x, order, lax.axis_index(axes).astype(jnp.uint32) if axes else None)
        if others:
            # The same on several devices, of which one counts, as `shard_map` sums the rows.
            row = jnp.where(lax.axis_index(others) == 0, row, jnp.zeros_like(row))
        y = PROBE.bind(x, name=name, kind="done", order=order)
        x = x.transpose(order)
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        # A part is put together with others along an axis.
        value = jnp.atleast_1d(x) if axes else x
        return Results([y], row[None], (value,) if context.keep_values else ())

    return Staged((Probe(name, kind, shape, str(aval.dtype), axes),), run)


def _names_in(equation: Any) -> Iterator[str]:
    _, params = _described(equation)
    traced = [value.jaxpr for value in params.values() if hasattr(value, "jaxpr")]
    for jaxpr in (*jaxprs_in_params(params), *traced):
        for inner in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if inner.primitive is PROBE and inner.params["kind"] not in _WITHOUT_ROW:
                yield inner.params["name"]
            yield from _names_in(inner)


# --- Programs inside of an equation.


def _inline(equation: Any, params: Any, context: Context) -> Staged:
    return stage(params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"], context)


def _jit(equation: Any, params: Any, context: Context) -> Staged:
    inside = stage(params["jaxpr"], context)

    def constrained(x: Any, sharding: Any) -> Any:
        is_given = isinstance(sharding, jax.sharding.Sharding)
        return lax.with_sharding_constraint(x, sharding) if is_given else x

    def run(*arguments: Any) -> Results:
        results = inside.run(*map(constrained, arguments, params["in_shardings"]))
        outputs = map(constrained, results.outputs, params["out_shardings"])
        return results._replace(outputs=[*outputs])

    return Staged(inside.plan, run)


def _checkpoint(equation: Any, params: Any, context: Context) -> Staged:
    inside = stage(params["jaxpr"], context)

    def run(*arguments: Any) -> Results:
        # Keeps XLA from finding that all this has been computed before.
        is_barred = params["differentiated"] and params["prevent_cse"]
        return inside.run(*(lax.optimization_barrier(arguments) if is_barred else arguments))

    return Staged(inside.plan, run)


def _scan(equation: Any, params: Any, context: Context) -> Staged:
    inside = stage(params["jaxpr"], context)

    def count(outside: Any, avals: Any) -> int:
        """Returns how many are scanned: they have an axis more outside than inside."""
        return sum(x.aval.ndim != a.ndim for x, a in zip(outside, avals, strict=True))

    carries = len(equation.outvars) - count(equation.outvars, params["jaxpr"].out_avals)
    scanned = count(equation.invars, params["jaxpr"].in_avals)
    constants = len(equation.invars) - carries - scanned

    def run(*arguments: Any) -> Results:
        fixed, given = arguments[:constants], [*arguments[constants:]]

        def body(carry: Any, xs: Any) -> Any:
            outputs, rows, values = inside.run(*fixed, *carry, *xs)
            return outputs[:carries], (outputs[carries:], rows, values)

        loop = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, (ys, rows, values) = lax.scan(body, given[:carries], given[carries:], **loop)
        rows = rows[::-1] if params["reverse"] else rows
        values = tuple(stack[i] for i in order for stack in values)
        return Results([*carry, *ys], rows.reshape(-1, 2), values)

    order = range(params["length"])[:: -1 if params["reverse"] else 1]  # as they are run
    plan = [p._replace(iteration=(i, *p.iteration)) for i in order for p in inside.plan]
    return Staged(tuple(plan), run)


def _cond(equation: Any, params: Any, context: Context) -> Staged:
    branches = [stage(branch, context) for branch in params["branches"]]

    def run(index: Array, *operands: Any) -> Results:
        # In the rows of a branch that is not taken both sums are 0, as they are of a value with
        # a chance of 2**-64.
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
    # Where values are cut up, they are put together along the first axis.
    cut = [
        PartitionSpec(tuple(axis for axis in probe.axes if axis in sizes))
        for probe in (inside.plan if context.keep_values else ())
    ]

    def body(*arguments: Any) -> Results:
        results = inside.run(*arguments)
        # The only communication that the probes need: all rows in one sum.
        return results._replace(rows=lax.psum(results.rows, tuple(sizes)))

    specs = {"in_specs": tuple(params["in_specs"]), "check_vma": check_vma}
    out_specs = Results([*params["out_specs"]], PartitionSpec(), tuple(cut))
    run = jax.shard_map(body, mesh=mesh, out_specs=out_specs, axis_names=set(manual), **specs)
    return Staged(inside.plan, run)


# A rule by the name of its primitive. That of `jax_remat3` has its barriers around it.
_RULES = {
    **dict.fromkeys(("closed_call", "core_call", "eval_jaxpr", "RematTraced"), _inline),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _inline),
    **dict.fromkeys(("remat2", "checkpoint"), _checkpoint),
    **{"jit": _jit, "scan": _scan, "cond": _cond, "shard_map": _shard_map},
}
