"""How the equations that have programs inside of them are staged.

Each is built anew by the public function that the user wrote it with, around the staged inside.
A derivative rule of the user's has been used by now, where it was needed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ._plan import Loop, count, probes
from ._staged import Context, Results, Stage, Staged


def _jit(equation: Any, context: Context, stage: Stage) -> Staged:
    of = equation.params
    return _compiled(
        stage,
        of["jaxpr"],
        context,
        of["in_shardings"],
        of["out_shardings"],
        of["donated_invars"],
    )


# Of one function, that is called again and again outside of a jit, one is compiled.
@functools.lru_cache(maxsize=64)
def _compiled(
    stage: Stage, jaxpr: Any, context: Context, into: Any, out: Any, donated: Any
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
    if not equation.params["differentiated"]:
        return stage(equation.params["jaxpr"], context)
    inside = stage(equation.params["jaxpr"], context._replace(recomputing=True))
    prevented = equation.params["prevent_cse"]

    def run(*arguments: Any) -> Results:
        # What keeps XLA from finding that all this has been computed before.
        barred = [i for i in range(len(arguments)) if prevented is True or prevented[i]]
        known = list(arguments)
        through = lax.optimization_barrier([known[i] for i in barred])
        for i, x in zip(barred, through, strict=True):
            known[i] = x
        return inside.run(*known)

    return Staged(inside.plan, run if prevented else inside.run)


def _scan(equation: Any, context: Context, stage: Stage) -> Staged:
    of = equation.params
    inside = stage(of["jaxpr"], context)
    # What is scanned over has an axis more outside than inside; carry and constants do not.
    scanned = _with_another_axis(equation.invars, of["jaxpr"].in_avals)
    stacked = _with_another_axis(equation.outvars, of["jaxpr"].out_avals)
    carries = len(equation.outvars) - stacked
    constants = len(equation.invars) - carries - scanned

    def run(*arguments: Any) -> Results:
        fixed = arguments[:constants]

        def body(carry: Any, xs: Any) -> Any:
            outputs, rows, values = inside.run(*fixed, *carry, *xs)
            return outputs[:carries], (outputs[carries:], rows, values)

        start = arguments[constants : constants + carries]
        xs = arguments[constants + carries :]
        loop = {key: of[key] for key in ("length", "reverse", "unroll")}
        carry, (ys, rows, values) = lax.scan(body, start, xs, **loop)
        if of["reverse"]:
            rows = rows[::-1]  # in the order in which they are run
        return Results((*carry, *ys), rows.reshape(-1, 2), values)

    plan = (Loop(of["length"], of["reverse"], inside.plan),) if inside.plan else ()
    return Staged(plan, run)


def _with_another_axis(outside: Any, inside: Any) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(atom.aval.ndim != aval.ndim for atom, aval in pairs)


def _cond(equation: Any, context: Context, stage: Stage) -> Staged:
    branches = [stage(branch, context) for branch in equation.params["branches"]]

    def whole(taken: int, *operands: Any) -> Results:
        """A branch, with the rows and values of the others blank."""
        rows, values = [], []
        results = branches[taken].run(*operands)
        for i, branch in enumerate(branches):
            if i == taken:
                rows.append(results.rows)
                values.extend(results.values)
            else:
                # Both sums 0, which no row is that there is (but one in 2**64).
                blank = jnp.zeros((count(branch.plan), 2), jnp.uint32)
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
    """As the branch that is taken has it, from the point of view of `check_vma`."""
    axes = tuple(axis for axis in axes if axis in context.axes)
    return lax.pcast(x, axes, to="varying") if axes and context.check_vma else x


def _shard_map(equation: Any, context: Context, stage: Stage) -> Staged:
    of = equation.params
    mesh, manual = of["mesh"], of["newly_manual_axes"]
    axes = tuple(axis for axis in mesh.axis_names if axis in manual)
    sizes = tuple((axis, mesh.shape[axis]) for axis in axes)
    context = context._replace(mesh_axes=context.mesh_axes + sizes, check_vma=of["check_vma"])
    inside = stage(of["jaxpr"], context)

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
            in_specs=tuple(of["in_specs"]),
            out_specs=(tuple(of["out_specs"]), PartitionSpec(), values),
            check_vma=of["check_vma"],
            axis_names=set(manual),
        )
        return Results(*mapped(*arguments))

    return Staged(inside.plan, run)


RULES = {
    "jit": _jit,
    "closed_call": _inline,
    "core_call": _inline,
    "custom_jvp_call": _inline,
    "custom_vjp_call": _inline,
    "remat2": _checkpoint,
    "checkpoint": _checkpoint,
    "scan": _scan,
    "cond": _cond,
    "shard_map": _shard_map,
}
