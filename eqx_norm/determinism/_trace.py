"""`recorded` traces a step, and returns what its probes have seen as well.

It traces the step, with all its derivatives and maps, into the program that JAX is going to
run, and evaluates that equation by equation, taking the fingerprint of each marked value. So
the rows have the order of the program, forward before backward; no transformation can miss a
probe or pass it twice; and no callback is needed. `_rules` builds those equations anew that
have programs inside of them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Literal, jaxprs_in_params
from jaxtyping import Array, ArrayLike, Int

from ._fingerprint import of_array
from ._ledger import Ledger
from ._probe import PROBE
from ._record import Probe, Record
from ._rules import NO_ROWS, RULES, Context, Results, Staged

# The kinds of marks that give no row.
_WITHOUT_ROW = ("recomputed", "done")


def recorded(
    function: Callable[..., Any], *, keep_values: bool = False
) -> Callable[..., tuple[Any, Record]]:
    """Returns `function`, changed to return what its probes have seen as well.

    ```python
    step = eqx.filter_jit(recorded(train_step))
    with Ledger("a.jsonl") as ledger:
        for i in range(100):
            (model, loss), record = step(model, batch(i))
            ledger.append(i, record)
    ```

    The fingerprints are outputs of the program; there is no callback. `recorded` goes around
    the whole step, including the part that takes the gradient, and inside of `jit`, outside of
    which everything is traced again at each call.

    Compare recorded runs with recorded runs: with more outputs, XLA may not merge a
    multiplication with an addition where a probe is between them.

    **Arguments:**

    - `function`: takes and returns any trees, and can be traced by `jax.jit`. Arguments that
        are no arrays are static.
    - `keep_values`: whether the record has the values of all probes, from which `compare` tells
        by how much they differ. It takes much memory, and is meant for a few steps.

    **Returns:** a function of the same arguments, which returns the pair of `function`'s result
    and a `Record`.

    **Raises:** on tracing, `NotImplementedError` for a probe in a `while_loop` or inside of an
    operation that has programs of its own in it (a Pallas kernel for example); `ValueError`
    where it stands inside a derivative.
    """

    @functools.wraps(function)
    def with_record(*args: Any, **kwargs: Any) -> tuple[Any, Record]:
        program: Any = eqx.filter_make_jaxpr(function)(*args, **kwargs)
        jaxpr, outputs, rest = program
        staged = stage(jaxpr, Context(keep_values))
        results = staged.run(*jax.tree.leaves(eqx.filter((args, kwargs), eqx.is_array)))
        output = jax.tree.unflatten(jax.tree.structure(outputs), results.outputs)
        record = Record(jnp.asarray(results.rows), results.values, staged.plan)
        return eqx.combine(output, rest), record

    # Equinox follows it, takes what it finds for a layer behind `jax.vmap`, and warns.
    del with_record.__wrapped__
    return with_record


def recorded_into(
    ledger: Ledger, function: Callable[..., Any], *, keep_values: bool = False
) -> Callable[..., Any]:
    """Returns `function`, changed to write what its probes have seen into `ledger`, by a
    callback.

    ```python
    with Ledger("a.jsonl") as ledger:
        step = eqx.filter_jit(recorded_into(ledger, train_step))
        for i in range(100):
            model, loss = step(jnp.asarray(i), model, batch(i))
    ```

    Use it where what a step returns cannot be changed, or in a `lax.scan` over steps. One
    callback a step writes the rows that `recorded` would return. It takes longer: JAX launches
    a program with a callback from Python, which takes a time for each array in or out.

    **Arguments:**

    - `ledger`: to be written to, until it is closed; closing it waits for the callbacks.
    - `function`, `keep_values`: as for `recorded`.

    **Returns:** a function of the step's number (an array, lest each step be compiled anew) and
    of `function`'s arguments, that returns `function`'s result.

    **Raises:** as `recorded`; on running, what `Ledger.append` raises.
    """
    with_record = recorded(function, keep_values=keep_values)

    # Not `functools.wraps`: the signature is another one, which `eqx.filter_jit` asks for.
    def into(step: Int[ArrayLike, ""], *args: Any, **kwargs: Any) -> Any:
        output, record = with_record(*args, **kwargs)
        io_callback(ledger.append, None, step, record)
        return output

    return into


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
            jnp.concatenate(rows) if rows else NO_ROWS,
            tuple(values),
        )

    return Staged(tuple(item for _, part in parts for item in part.plan), run)


def _stage_equation(equation: Any, context: Context) -> Staged:
    primitive = equation.primitive
    if primitive is PROBE:
        return _stage_probe(equation, context)
    rule = RULES.get(primitive.name)
    if rule is None:
        _refuse_probes_in(equation)
    else:
        staged = rule(equation, context, stage)
        if staged.plan:
            return staged

    def run(*arguments: Any) -> Results:
        outputs = primitive.bind(*arguments, **primitive.get_bind_params(equation.params))
        return Results(tuple(outputs) if primitive.multiple_results else (outputs,))

    return Staged((), run)


def _stage_probe(equation: Any, context: Context) -> Staged:
    name, kind, order = (equation.params[key] for key in ("name", "kind", "order"))
    if kind in _WITHOUT_ROW:
        return Staged((), lambda x: Results((x,)))
    aval = equation.invars[0].aval
    varying = aval.manual_axis_type.varying if context.check_vma else context.axes
    cut = tuple((axis, size) for axis, size in context.mesh_axes if axis in varying)
    axes = tuple(axis for axis, _ in cut)
    others = tuple(axis for axis in context.axes if axis not in axes)
    shape = tuple(aval.shape[axis] for axis in order)
    if axes:
        first, *rest = shape or (1,)
        shape = (first * math.prod(size for _, size in cut), *rest)

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


def _array(x: Any, aval: Any) -> Array:
    """Returns a literal, which may be a number of Python's or NumPy's, as an array."""
    if isinstance(x, Array):
        return x
    return jnp.asarray(x, None if aval.weak_type else aval.dtype)


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


def _names_in(equation: Any) -> Any:
    for jaxpr in jaxprs_in_params(equation.params):
        for inner in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if inner.primitive is PROBE and inner.params["kind"] not in _WITHOUT_ROW:
                yield inner.params["name"]
            yield from _names_in(inner)
