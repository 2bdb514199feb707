"""Evaluates a program equation by equation, taking the fingerprint of each marked value.

An equation that has a program inside of it is built anew by the public function that the user
wrote it with, around the inside as evaluated here. JAX has applied custom derivative rules
before, so that they are plain calls here.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params
from jax.sharding import PartitionSpec
from jaxtyping import Array, UInt32

from ._fingerprint import of_array
from ._probe import PROBE
from ._record import Loop, Plan, Probe, places, probes

_NO_ROWS = np.zeros((0, 2), np.uint32)
# The kinds of marks that give no row.
_WITHOUT_ROW = ("recomputed", "done")


class Results(NamedTuple):
    """Holds what a part of a program returns, the fingerprints of its rows, and, where they are
    kept, the values of its probes."""

    outputs: tuple[Any, ...]
    rows: UInt32[Array | np.ndarray, "rows 2"] = _NO_ROWS
    values: tuple[Array, ...] = ()


class Staged(NamedTuple):
    """Says which rows a part of a program gives, and evaluates it."""

    plan: Plan
    run: Callable[..., Results]


class Context(NamedTuple):
    """Says where in the program an equation stands."""

    keep_values: bool
    mesh_axes: tuple[tuple[str, int], ...] = ()  # of each `shard_map` around: name and size
    check_vma: bool = True  # whether JAX knows over which of these a value varies

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.mesh_axes)


def stage(jaxpr: Any, context: Context) -> Staged:
    """Returns the plan of a program's rows, and the program that gives them.

    `jaxpr` comes with its constants or without.
    """
    constants, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
    parts = [(equation, _stage_equation(equation, context)) for equation in jaxpr.eqns]

    def run(*arguments: Any) -> Results:
        given = [*jaxpr.constvars, *jaxpr.invars]
        known = dict(zip(given, [*constants, *arguments], strict=True))

        def read(atoms: Any) -> list[Any]:
            return [a.val if isinstance(a, Literal) else known[a] for a in atoms]

        rows, values = [], []
        for equation, part in parts:
            with equation.ctx.manager:
                results = part.run(*read(equation.invars))
            known.update(zip(equation.outvars, results.outputs, strict=True))
            if part.plan:
                rows.append(results.rows)
                values.extend(results.values)
        outs = zip(read(jaxpr.outvars), jaxpr.outvars, strict=True)
        return Results(
            tuple(_array(x, atom.aval) for x, atom in outs),
            jnp.concatenate(rows) if rows else _NO_ROWS,
            tuple(values),
        )

    return Staged(tuple(item for _, part in parts for item in part.plan), run)


def _stage_equation(equation: Any, context: Context) -> Staged:
    primitive = equation.primitive
    if primitive is PROBE:
        return _stage_probe(equation, context)
    if primitive.name in _RULES:
        staged = _RULES[primitive.name](equation, context)
        if staged.plan:
            return staged
    else:
        _refuse_probes_in(equation)

    def run(*arguments: Any) -> Results:
        outputs = primitive.bind(*arguments, **primitive.get_bind_params(equation.params))
        return Results(tuple(outputs) if primitive.multiple_results else (outputs,))

    return Staged((), run)


def _array(x: Any, aval: Any) -> Array:
    """Returns a literal, which may be a number of Python's or NumPy's, as an array."""
    if isinstance(x, Array):
        return x
    return jnp.asarray(x, None if aval.weak_type else aval.dtype)


# --- A probe.


def _stage_probe(equation: Any, context: Context) -> Staged:
    name, kind, order = (equation.params[key] for key in ("name", "kind", "order"))
    if kind in _WITHOUT_ROW:
        return Staged((), lambda x: Results((x,)))
    aval = equation.invars[0].aval
    varying = aval.manual_axis_type.varying if context.check_vma else context.axes
    cut = {axis: size for axis, size in context.mesh_axes if axis in varying}
    axes = tuple(cut)
    others = tuple(axis for axis in context.axes if axis not in cut)
    shape = tuple(aval.shape[axis] for axis in order)
    if axes:
        first, *rest = shape or (1,)
        shape = (first * math.prod(cut.values()), *rest)

    def run(x: Any) -> Results:
        x = _array(x, aval)
        part = lax.axis_index(axes).astype(jnp.uint32) if axes else None
        row = of_array(x, order, part)
        if others:
            # The same on several devices, of which one counts, as `shard_map` sums the rows.
            row = jnp.where(lax.axis_index(others) == 0, row, jnp.zeros_like(row))
        values = (_value(x, order, bool(axes)),) if context.keep_values else ()
        x = PROBE.bind(x, name=name, kind="done", order=order)
        return Results((x,), row[None], values)

    return Staged((Probe(name, kind, shape, str(aval.dtype), axes),), run)


def _value(x: Array, order: tuple[int, ...], is_part: bool) -> Array:
    """Returns what is kept of a value: the data of a key, and an axis at least of a part."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, order = jax.random.key_data(x), (*order, x.ndim)
    x = x.transpose(order)
    return jnp.atleast_1d(x) if is_part else x


def _refuse_probes_in(equation: Any) -> None:
    name = next(_names_in(equation), None)
    if name is None:
        return
    if equation.primitive.name == "while":
        raise NotImplementedError(
            f"monitor(..., {name!r}) stands in a loop that runs for a number of times which is "
            "not known beforehand (lax.while_loop, or lax.fori_loop with traced bounds), so "
            "there is no place for its rows. Use lax.scan, or lax.fori_loop with ints as "
            "bounds, or monitor what the loop returns."
        )
    raise NotImplementedError(
        f"monitor(..., {name!r}) stands in a {equation.primitive.name!r}, inside of which "
        "recorded(...) cannot see. Monitor its arguments and its result instead."
    )


def _names_in(equation: Any) -> Iterator[str]:
    for jaxpr in jaxprs_in_params(equation.params):
        for inner in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if inner.primitive is PROBE and inner.params["kind"] not in _WITHOUT_ROW:
                yield inner.params["name"]
            yield from _names_in(inner)


# --- Programs inside of an equation.


def _jit(equation: Any, context: Context) -> Staged:
    keys = ("jaxpr", "in_shardings", "out_shardings", "donated_invars")
    return _compiled(context, *(equation.params[key] for key in keys))


# A function that is called again and again outside of a jit is compiled once.
@functools.lru_cache(maxsize=64)
def _compiled(context: Context, jaxpr: Any, into: Any, out: Any, donated: Any) -> Staged:
    inside = stage(jaxpr, context)

    def run(*arguments: Any) -> Results:
        results = inside.run(*map(_constrained, arguments, into))
        return results._replace(outputs=tuple(map(_constrained, results.outputs, out)))

    donate = tuple(i for i, given_away in enumerate(donated) if given_away)
    return Staged(inside.plan, jax.jit(run, donate_argnums=donate))


def _constrained(x: Any, sharding: Any) -> Any:
    is_given = isinstance(sharding, jax.sharding.Sharding)
    return lax.with_sharding_constraint(x, sharding) if is_given else x


def _inline(equation: Any, context: Context) -> Staged:
    return stage(equation.params["call_jaxpr"], context)


def _checkpoint(equation: Any, context: Context) -> Staged:
    inside = stage(equation.params["jaxpr"], context)
    prevented = equation.params["differentiated"] and equation.params["prevent_cse"]

    def run(*arguments: Any) -> Results:
        # Keeps XLA from finding that all this has been computed before.
        is_barred = prevented if isinstance(prevented, tuple) else len(arguments) * (True,)
        barred, others = eqx.partition(arguments, is_barred)
        return inside.run(*eqx.combine(lax.optimization_barrier(barred), others))

    return Staged(inside.plan, run if prevented else inside.run)


def _scan(equation: Any, context: Context) -> Staged:
    params = equation.params
    inside = stage(params["jaxpr"], context)
    # What is scanned over has an axis more outside than inside; carry and constants do not.
    scanned = _with_another_axis(equation.invars, params["jaxpr"].in_avals)
    stacked = _with_another_axis(equation.outvars, params["jaxpr"].out_avals)
    carries = len(equation.outvars) - stacked
    constants = len(equation.invars) - carries - scanned

    def run(*arguments: Any) -> Results:
        fixed = arguments[:constants]
        start = arguments[constants : constants + carries]
        xs = arguments[constants + carries :]

        def body(carry: Any, xs: Any) -> Any:
            outputs, rows, values = inside.run(*fixed, *carry, *xs)
            return outputs[:carries], (outputs[carries:], rows, values)

        loop = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, (ys, rows, values) = lax.scan(body, start, xs, **loop)
        if params["reverse"]:
            rows = rows[::-1]  # in the order in which they are run
        return Results((*carry, *ys), rows.reshape(-1, 2), values)

    plan = (Loop(params["length"], params["reverse"], inside.plan),) if inside.plan else ()
    return Staged(plan, run)


def _with_another_axis(outside: Any, inside: Any) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(atom.aval.ndim != aval.ndim for atom, aval in pairs)


def _cond(equation: Any, context: Context) -> Staged:
    branches = [stage(branch, context) for branch in equation.params["branches"]]

    def whole(taken: int, *operands: Any) -> Results:
        """Runs a branch, with the rows and values of the others blank."""
        rows, values = [], []
        results = branches[taken].run(*operands)
        for i, branch in enumerate(branches):
            if i == taken:
                rows.append(results.rows)
                values.extend(results.values)
                continue
            # Both sums are 0, as a value's are with a chance of 2**-64.
            blank = jnp.zeros((len(places(branch.plan)), 2), jnp.uint32)
            rows.append(_varying(blank, context.axes, context))
            if context.keep_values:
                like = jax.eval_shape(branch.run, *operands).values
                values.extend(
                    _varying(jnp.zeros(value.shape, value.dtype), probe.axes, context)
                    for value, (probe, _) in zip(like, probes(branch.plan), strict=True)
                )
        return Results(results.outputs, jnp.concatenate(rows), tuple(values))

    def run(index: Array, *operands: Any) -> Results:
        chosen = [functools.partial(whole, i) for i in range(len(branches))]
        return lax.switch(index, chosen, *operands)

    return Staged(tuple(item for branch in branches for item in branch.plan), run)


def _varying(x: Array, axes: tuple[str, ...], context: Context) -> Array:
    """Returns `x`, typed as varying over those of `axes` that are mapped, for `check_vma`."""
    axes = tuple(axis for axis in axes if axis in context.axes)
    return lax.pcast(x, axes, to="varying") if axes and context.check_vma else x


def _shard_map(equation: Any, context: Context) -> Staged:
    params = equation.params
    mesh, manual, check_vma = (
        params[key] for key in ("mesh", "newly_manual_axes", "check_vma")
    )
    axes = tuple(axis for axis in mesh.axis_names if axis in manual)
    sizes = tuple((axis, mesh.shape[axis]) for axis in axes)
    context = context._replace(mesh_axes=context.mesh_axes + sizes, check_vma=check_vma)
    inside = stage(params["jaxpr"], context)

    def body(*arguments: Any) -> Any:
        outputs, rows, values = inside.run(*arguments)
        # The only communication that the probes need: all rows in one sum.
        return outputs, lax.psum(rows, axes), values

    def run(*arguments: Any) -> Results:
        values = tuple(
            PartitionSpec(*[None] * depth, tuple(axis for axis in probe.axes if axis in axes))
            for probe, depth in (probes(inside.plan) if context.keep_values else ())
        )
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(params["in_specs"]),
            out_specs=(tuple(params["out_specs"]), PartitionSpec(), values),
            check_vma=check_vma,
            axis_names=set(manual),
        )
        return Results(*mapped(*arguments))

    return Staged(inside.plan, run)


# A rule by the name of its primitive, in jax 0.10.2 or 0.12.0.1.
_RULES = {
    "jit": _jit,
    "closed_call": _inline,
    "core_call": _inline,
    "eval_jaxpr": _inline,
    "custom_jvp_call": _inline,
    "custom_vjp_call": _inline,
    "remat2": _checkpoint,
    "checkpoint": _checkpoint,
    "scan": _scan,
    "cond": _cond,
    "shard_map": _shard_map,
}
