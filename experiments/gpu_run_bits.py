"""Whether the bits are the same in every run: forward, and backward."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .benchmark_layers import BOTH
from .gpu_run_contenders import made_for
from .gpu_run_job import Problem
from .gpu_run_programs import PROGRAMS, Noise, flattened
from .gpu_run_rows import BITS, Row, because

FORWARD, BACKWARD = "forward", "backward"


def _bits(a: Array) -> Array:
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return a
    return jax.lax.bitcast_convert_type(a, jnp.dtype(f"uint{8 * a.dtype.itemsize}"))


@jax.jit
def _differ(one: Any, other: Any) -> Array:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jnp.stack([jnp.any(_bits(a) != _bits(b)) for a, b in pairs]).any()


def measure(
    problem: Problem, names: Sequence[str], noise: Noise, runs: int, pool: Executor
) -> list[Row]:
    """Of so many runs, how many gave other bits than the first: y and the new state; and the
    gradients of x, weight and bias."""
    ((x, dy),) = noise.given(problem, 1)

    def compile_(name: str) -> tuple[Any, list[Array]]:
        made = made_for(problem, name)
        program, leaves = flattened(PROGRAMS[BOTH](made.apply), made)
        return jax.jit(program).lower(leaves, x, dy).compile(), leaves

    compiled = {name: pool.submit(compile_, name) for name in names}
    rows = []
    for name in names:
        row = Row(
            BITS,
            problem.name,
            problem.layout,
            problem.dtype,
            "",
            name,
            problem.bytes,
            calls=runs,
        )
        try:
            counted = _count(*compiled[name].result(), x, dy, runs)
        except Exception as error:  # whatever it is, the others are to be measured
            rows.append(because(row, error))
        else:
            rows += [dataclasses.replace(row, program=p, value=n) for p, n in counted.items()]
    return rows


def _count(
    program: Any, leaves: list[Array], x: Array, dy: Array, runs: int
) -> dict[str, float]:
    y, state, slope = program(leaves, x, dy)
    found = []
    for _ in range(runs - 1):
        other_y, other_state, other_slope = program(leaves, x, dy)
        forward = _differ((y, state), (other_y, other_state))
        found.append(jnp.stack([forward, _differ(slope, other_slope)]))
    forward, backward = jnp.stack(found).sum(0).tolist()
    return {FORWARD: float(forward), BACKWARD: float(backward)}
