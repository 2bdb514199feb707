"""Stages the equations that have programs inside of them.

Each is built anew by the public function that the user wrote it with, around the staged inside.
JAX has applied custom derivative rules before, so that they are plain calls here.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, UInt32

from ._record import Loop, Plan, places, probes

NO_ROWS = np.zeros((0, 2), np.uint32)


class Results(NamedTuple):
    """Holds what a part of a program returns, the fingerprints of its rows, and, where they are
    kept, the values of its probes."""

    outputs: tuple[Any, ...]
    rows: UInt32[Array | np.ndarray, "rows 2"] = NO_ROWS
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


# `_trace.stage`, which the rules need for the programs inside of an equation.
Stage = Callable[[Any, Context], Staged]


def _jit(equation: Any, context: Context, stage: Stage) -> Staged:
    keys = ("jaxpr", "in_shardings", "out_shardings", "donated_invars")
    return _compiled(stage, context, *(equation.params[key] for key in keys))


# A function that is called again and again outside of a jit is compiled once.
@functools.lru_cache(maxsize=64)
def _compiled(
    stage: Stage, context: Context, jaxpr: Any, into: Any, out: Any, donated: Any
) -> Staged:
    inside = stage(jaxpr, context)

    def run(*arguments: Any) -> Results:
        results = inside.run(*map(_constrained, arguments, into))
        return results._replace(outputs=tuple(map(_constrained, results.outputs, out)))

    donate = tuple(i for i, given_away in enumerate(donated) if given_away)
    return Staged(inside.plan, jax.jit(run, donate_argnums=donate))


def _constrained(x: Any, sharding: Any) -> Any:
    is_given = isinstance(sharding, jax.sharding.Sharding)
    return lax.with_sharding_constraint(x, sharding) if is_given else x


def _inline(equation: Any, context: Context, stage: Stage) -> Staged:
    return stage(equation.params["call_jaxpr"], context)


def _checkpoint(equation: Any, context: Context, stage: Stage) -> Staged:
    inside = stage(equation.params["jaxpr"], context)
    prevented = equation.params["differentiated"] and equation.params["prevent_cse"]

    def run(*arguments: Any) -> Results:
        # Keeps XLA from finding that all this has been computed before.
        known = list(arguments)
        barred = [i for i in range(len(known)) if prevented is True or prevented[i]]
        through = lax.optimization_barrier([known[i] for i in barred])
        for i, x in zip(barred, through, strict=True):
            known[i] = x
        return inside.run(*known)

    return Staged(inside.plan, run if prevented else inside.run)


def _scan(equation: Any, context: Context, stage: Stage) -> Staged:
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


def _cond(equation: Any, context: Context, stage: Stage) -> Staged:
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


def _shard_map(equation: Any, context: Context, stage: Stage) -> Staged:
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
RULES = {
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
