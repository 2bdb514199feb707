"""A program with probes, turned into one that returns their fingerprints as well.

`recorded` traces a step, with all its derivatives and maps, into the one program that JAX is
going to run, and has that evaluated here equation by equation. So the order of the rows is that
of the program, forward before backward; no transformation is left that could miss a probe or
pass it twice; and no callback is needed.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params
from jaxtyping import Array

from . import _fingerprint
from ._plan import Probe
from ._primitive import PROBE
from ._rules import RULES
from ._staged import Context, Results, Staged, no_rows


def stage(jaxpr: Any, context: Context) -> Staged:
    """`jaxpr` with or without its constants."""
    constants, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
    parts = [(equation, _stage_equation(equation, context)) for equation in jaxpr.eqns]

    def run(*arguments: Any) -> Results:
        given = [*jaxpr.constvars, *jaxpr.invars]
        known = dict(zip(given, [*constants, *arguments], strict=True))

        def read(atoms: Any) -> list[Any]:
            return [a.val if isinstance(a, Literal) else known[a] for a in atoms]

        rows, values, outs = [], [], jaxpr.outvars
        for equation, part in parts:
            with equation.ctx.manager:
                results = part.run(*read(equation.invars))
            known.update(zip(equation.outvars, results.outputs, strict=True))
            if part.plan:
                rows.append(results.rows)
                values.extend(results.values)
        return Results(
            tuple(_array(x, a.aval) for x, a in zip(read(outs), outs, strict=True)),
            jnp.concatenate(rows) if rows else no_rows(),
            tuple(values),
        )

    return Staged(tuple(item for _, part in parts for item in part.plan), run)


def _stage_equation(equation: Any, context: Context) -> Staged:
    if equation.primitive is PROBE:
        return _stage_probe(equation, context)
    rule = RULES.get(equation.primitive.name)
    if rule is None:
        _refuse_probes_in(equation)
    else:
        staged = rule(equation, context, stage)
        if staged.plan:
            return staged

    def run(*arguments: Any) -> Results:
        parameters = equation.primitive.get_bind_params(equation.params)
        outputs = equation.primitive.bind(*arguments, **parameters)
        several = equation.primitive.multiple_results
        return Results(tuple(outputs) if several else (outputs,), no_rows())

    return Staged((), run)


def _stage_probe(equation: Any, context: Context) -> Staged:
    name, kind, order = (equation.params[key] for key in ("name", "kind", "order"))
    if kind == "done" or (context.recomputing and kind != "cotangent"):
        return Staged((), lambda x: Results((x,), no_rows()))
    aval = equation.invars[0].aval
    varying = aval.manual_axis_type.varying if context.check_vma else context.axes
    cut = tuple((axis, size) for axis, size in context.mesh_axes if axis in varying)
    axes = tuple(axis for axis, _ in cut)
    shape = tuple(aval.shape[axis] for axis in order)
    if axes:
        first, *rest = shape or (1,)
        shape = (first * math.prod(size for _, size in cut), *rest)

    def run(x: Any) -> Results:
        x = _array(x, aval)
        part = lax.axis_index(axes).astype(jnp.uint32) if axes else None
        row = _fingerprint.of_array(x, order, part)
        others = tuple(axis for axis in context.axes if axis not in axes)
        if others:
            # The same on several devices, of which one counts, as `shard_map` sums the rows.
            row = jnp.where(lax.axis_index(others) == 0, row, jnp.zeros_like(row))
        values = (_value(x, order, bool(axes)),) if context.keep_values else ()
        x = PROBE.bind(x, name=name, kind="done", order=order)
        return Results((x,), row[None], values)

    return Staged((Probe(name, kind, shape, str(aval.dtype), axes),), run)


def _array(x: Any, aval: Any) -> Array:
    """A literal is none of JAX's arrays."""
    if isinstance(x, Array):
        return x
    return jnp.asarray(x, None if aval.weak_type else aval.dtype)


def _value(x: Array, order: tuple[int, ...], is_part: bool) -> Array:
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


def _names_in(equation: Any) -> Any:
    for jaxpr in jaxprs_in_params(equation.params):
        for inner in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if inner.primitive is PROBE and inner.params["kind"] != "done":
                yield inner.params["name"]
            yield from _names_in(inner)
