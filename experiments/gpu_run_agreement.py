"""Whether all that is timed computes the same thing. A race between programs with different
results has no winner."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import benchmark_cases, layer_norm_gradients
from .benchmark_agreement import TOLERANCE, Agreement
from .benchmark_layers import BOTH, DTYPES, Numbers, Outputs
from .gpu_run_contenders import made_for
from .gpu_run_job import BATCH_NORM, LAST, Problem
from .gpu_run_programs import differentiated
from .gpu_run_rows import AGREEMENT, Row, because
from .gpu_run_torch import COMPILED, TORCH, Torch
from .layer_norm_layers import Batch

DIFFERS = "differs"


def _in_jax(make: Callable[[int], Any], problem: Problem, given: Numbers) -> Outputs:
    def placed(a: Any) -> Any:
        moved = np.moveaxis(a, 1, -1) if problem.layout == LAST else a
        return jnp.asarray(moved.reshape(problem.given)).astype(DTYPES[problem.dtype])

    def back(a: Any) -> Any:
        array = np.asarray(a, np.float32)
        if problem.layout != LAST:
            return array
        batch, channels, *spatial = problem.shape
        return np.moveaxis(array.reshape(batch, *spatial, channels), -1, 1)

    run = differentiated(make)
    y, dx, dweight, dbias, _ = run(given.weight, given.bias, placed(given.x), placed(given.dy))
    return Outputs(back(y), back(dx), np.asarray(dweight), np.asarray(dbias))


def _off_layer_norm(problem: Problem, given: Numbers) -> Callable[[Outputs], float]:
    x, dy = (
        np.asarray(jnp.asarray(a).astype(DTYPES[problem.dtype])) for a in (given.x, given.dy)
    )
    exact, _ = layer_norm_gradients.exact(Batch(x, dy, given.weight, given.bias))

    def off(outputs: Outputs) -> float:
        pairs = zip(outputs, (exact.y, exact.dx, exact.dweight, exact.dbias), strict=True)
        largest = [np.max(np.abs(found - right)) for found, right in pairs]
        # The last two are sums over the rows.
        scaled = np.array(largest) / (1, 1, len(x), len(x))
        return float(np.nan_to_num(np.max(scaled), nan=np.inf))

    return off


def measure(problem: Problem, names: Sequence[str], device: str) -> list[Row]:
    """The largest deviation of each contender from the same in float64."""
    given = benchmark_cases.numbers(problem.shape)
    if problem.kind == BATCH_NORM:
        off = Agreement(given, problem.dtype).deviation
    else:
        off = _off_layer_norm(problem, given)

    def outputs(name: str) -> Outputs:
        if name in (TORCH, COMPILED):
            compiled = name == COMPILED
            return Torch(
                problem, BOTH, 1, compiled=compiled, device=device, numbers=given
            ).outputs()
        return _in_jax(lambda _: made_for(problem, name), problem, given)

    rows = []
    for name in names:
        row = Row(AGREEMENT, problem.name, problem.layout, problem.dtype, BOTH, name)
        try:
            value = off(outputs(name))
        except Exception as error:  # whatever it is, the others are to be measured
            rows.append(because(row, error))
        else:
            note = "" if value <= TOLERANCE[problem.dtype] else DIFFERS
            rows.append(dataclasses.replace(row, value=value, note=note))
    return rows
