"""Evaluates a traced program, and returns a fingerprint of each value that `_mark` has marked.

`evaluate` evaluates one equation after the other. For an equation that contains a program
(`scan`, `cond`, ...), it calls JAX's public function, with `evaluate` inside. The names and
parameters of equations may change: tests/determinism/test_transformations.py checks them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, ArrayLike, Shaped, UInt32

from eqx_norm._jax.jaxprs import Jaxpr, JaxprEqn, Literal, Var, evaluated, within
from eqx_norm._jax.lowering import Aval

from ._fingerprint import of_array
from ._mark import PROBE, WITHOUT_ROW


class Probe(NamedTuple):
    """Describes a row: one pass of a probe."""

    name: str
    kind: str  # "forward", "tangent" or "cotangent"
    shape: tuple[int, ...]  # of the whole value
    dtype: str
    axes: tuple[str, ...]  # the mesh axes over which `shard_map` splits the value
    iteration: tuple[int, ...] = ()  # of each loop around the probe


Values = tuple[Shaped[Array | np.ndarray, "..."], ...]


class Record(eqx.Module):
    """Holds the rows of the probes of one step, for `Ledger.append`.

    A record is a pytree, which `jax.jit`, `jax.vmap` and `jax.lax.scan` may return;
    `jax.tree.map(lambda a: a[i], records)` takes out one member or step.

    **Fields:** `fingerprints`: uint32, two for each row; `values`: the kept values of each row,
    if any; `plan`: the name, kind, shape and dtype of each row.
    """

    fingerprints: UInt32[Array | np.ndarray, "*mapped rows 2"]
    values: Values
    plan: tuple[Probe, ...] = eqx.field(static=True)


def _joined(records: Sequence[Record]) -> Record:
    rows = [record.fingerprints for record in records]
    values = [value for record in records for value in record.values]
    plan = [probe for record in records for probe in record.plan]
    none = jnp.zeros((0, 2), jnp.uint32)
    return Record(jnp.concatenate([none, *rows]), tuple(values), tuple(plan))


Evaluated = tuple[list[ArrayLike], Record]  # outputs, and the record of the probes


class Context(NamedTuple):
    """Describes the surroundings of an equation."""

    keep_values: bool
    mesh_axes: tuple[str, ...] = ()  # of each `shard_map`
    check_vma: bool = True  # whether JAX tracks over which mesh axes a value varies


def evaluate(jaxpr: Jaxpr, context: Context, *arguments: ArrayLike) -> Evaluated:
    """Returns the outputs of a program, and the record of its probes in order."""
    records = list[Record]()

    def rule(equation: JaxprEqn, operands: list[ArrayLike]) -> list[ArrayLike] | None:
        if not any(_names_in(equation)):
            return None
        evaluate_equation = _RULES.get(equation.primitive.name, _refuse)
        outputs, record = evaluate_equation(equation, context, *operands)
        records.append(record)
        return outputs

    outputs = evaluated(jaxpr, *arguments, rule=rule)
    return outputs, _joined(records)


def _names_in(equation: JaxprEqn) -> Iterator[str]:
    """Yields the names of the marks with a row: of an equation, and of the programs inside."""
    for inner in within(equation):
        if inner.primitive is PROBE and inner.params["kind"] not in WITHOUT_ROW:
            yield inner.params["name"]


def _refuse(equation: JaxprEqn, context: Context, *operands: ArrayLike) -> NoReturn:
    raise NotImplementedError(
        f"monitor(..., {next(_names_in(equation))!r}) is in a {equation.primitive.name!r}, and "
        "recorded(...) cannot look inside. Monitor its arguments and result instead; use "
        "lax.scan in place of a loop whose length is not known while tracing (lax.while_loop, "
        "or lax.fori_loop with traced bounds)."
    )


def _probe(equation: JaxprEqn, context: Context, operand: ArrayLike) -> Evaluated:
    name = equation.params["name"]
    kind = equation.params["kind"]
    order = equation.params["order"]
    x = jnp.asarray(operand)  # the operand may be a number
    varying = frozenset(context.mesh_axes)
    if context.check_vma:
        varying = jax.typeof(x).manual_axis_type.varying
    split = tuple(axis for axis in context.mesh_axes if axis in varying)
    replicated = tuple(axis for axis in context.mesh_axes if axis not in varying)
    value = x.transpose(order)
    row = of_array(value, lax.axis_index(split).astype(jnp.uint32) if split else None)
    if replicated:
        # Of equal values on several devices only one counts: `shard_map` sums the rows.
        row = jnp.where(lax.axis_index(replicated) == 0, row, 0)
    shape = value.shape
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if split:
        # Shards are concatenated along an axis, so a scalar gets an axis.
        value = jnp.atleast_1d(value)
        length, *rest = shape or (1,)
        shape = (length * lax.axis_size(split), *rest)
    y = PROBE.bind(x, name=name, kind="done", order=order)
    probe = Probe(name, kind, shape, str(x.dtype), split)
    return [y], Record(row[None], (value,) if context.keep_values else (), (probe,))


# --- Programs inside of an equation.


def _call(equation: JaxprEqn, context: Context, *operands: ArrayLike) -> Evaluated:
    params = equation.params
    return evaluate(params.get("call_jaxpr") or params["jaxpr"], context, *operands)


def _jit(equation: JaxprEqn, context: Context, *operands: ArrayLike) -> Evaluated:
    params = equation.params
    return jax.jit(
        functools.partial(evaluate, params["jaxpr"], context),
        in_shardings=params["in_shardings"],
        out_shardings=([*params["out_shardings"]], None),
    )(*operands)


def _checkpoint(equation: JaxprEqn, context: Context, *operands: ArrayLike) -> Evaluated:
    if equation.params["differentiated"] and equation.params["prevent_cse"]:
        # The barrier keeps XLA from reusing the results of the first pass.
        operands = lax.optimization_barrier(operands)
    return _call(equation, context, *operands)


def _scan(equation: JaxprEqn, context: Context, *operands: ArrayLike) -> Evaluated:
    params = equation.params
    jaxpr = params["jaxpr"]
    carries = len(equation.outvars) - _count_scanned(equation.outvars, jaxpr.out_avals)
    scanned = _count_scanned(equation.invars, jaxpr.in_avals)
    constants = len(operands) - carries - scanned
    fixed = operands[:constants]
    start = [*operands[constants : constants + carries]]

    def body(carry: list[ArrayLike], xs: list[ArrayLike]) -> tuple[list[ArrayLike], Evaluated]:
        outputs, record = evaluate(jaxpr, context, *fixed, *carry, *xs)
        return outputs[:carries], (outputs[carries:], record)

    carry, (ys, record) = lax.scan(
        body,
        start,
        [*operands[constants + carries :]],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    iterations = [*range(params["length"])]
    fingerprints = record.fingerprints
    if params["reverse"]:  # the rows are in the order of execution
        iterations.reverse()
        fingerprints = fingerprints[::-1]
    return [*carry, *ys], Record(
        fingerprints.reshape(-1, 2),
        tuple(stack[i] for i in iterations for stack in record.values),
        tuple(p._replace(iteration=(i, *p.iteration)) for i in iterations for p in record.plan),
    )


def _count_scanned(variables: Sequence[Var | Literal], inside: Sequence[Aval]) -> int:
    """Returns how many variables have one more axis outside of the loop than inside."""
    outside: list[Any] = [variable.aval for variable in variables]
    scanned = [a for a, b in zip(outside, inside, strict=True) if a.ndim != b.ndim]
    return len(scanned)


def _cond(
    equation: JaxprEqn, context: Context, index: ArrayLike, *operands: ArrayLike
) -> Evaluated:
    branches = [
        functools.partial(evaluate, jaxpr, context) for jaxpr in equation.params["branches"]
    ]
    # A row of a branch that is not taken has two sums of 0; a row of a value has two sums of 0
    # with a probability of 2**-64.
    shapes = [jax.eval_shape(branch, *operands)[1] for branch in branches]

    def take(i: int, *operands: ArrayLike) -> Evaluated:
        records = jax.tree.map(jnp.zeros_like, shapes)
        outputs, records[i] = branches[i](*operands)
        return outputs, _joined(records)

    functions = [functools.partial(take, i) for i in range(len(branches))]
    return lax.switch(index, functions, *operands)


def _shard_map(equation: JaxprEqn, context: Context, *operands: ArrayLike) -> Evaluated:
    params = equation.params
    axes = tuple(a for a in params["mesh"].axis_names if a in params["newly_manual_axes"])

    def run(
        keep_values: bool, specs: tuple[PartitionSpec, ...]
    ) -> tuple[list[ArrayLike], Record, Values]:
        inside = Context(keep_values, (*context.mesh_axes, *axes), params["check_vma"])

        def body(*operands: ArrayLike) -> tuple[list[ArrayLike], Record, Values]:
            outputs, record = evaluate(params["jaxpr"], inside, *operands)
            # One sum of all rows is the only communication that the probes need.
            rows = lax.psum(record.fingerprints, axes)
            return outputs, Record(rows, (), record.plan), record.values

        return jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=([*params["out_specs"]], PartitionSpec(), specs),
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )(*operands)

    specs = ()
    if context.keep_values:
        # Split values are concatenated along the first axis. The plan says which are split.
        plan = jax.eval_shape(lambda: run(False, ()))[1].plan
        split = [tuple(axis for axis in probe.axes if axis in axes) for probe in plan]
        # The others may be scalars, whose spec has no entry.
        specs = tuple(PartitionSpec(names) if names else PartitionSpec() for names in split)
    outputs, record, values = run(context.keep_values, specs)
    return outputs, Record(record.fingerprints, values, record.plan)


# The rules by the names of primitives.
_RULES: dict[str, Callable[..., Evaluated]] = {
    PROBE.name: _probe,
    "jit": _jit,
    "custom_jvp_call": _call,
    "custom_vjp_call": _call,
    "eval_jaxpr": _call,
    "closed_call": _call,  # for jax 0.10; in 0.12 the primitive is `eval_jaxpr`
    "remat2": _checkpoint,
    "scan": _scan,
    "cond": _cond,
    "shard_map": _shard_map,
}
