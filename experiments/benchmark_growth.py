"""How the time that this layer takes grows with the size of its input.

The memory has to be the program's, or else it is the allocator that is measured. Results that
are new arrays at every call are, from 32 MiB on, fresh pages: glibc returns larger ones to the
system, and to get pages takes longer than the arithmetic. So y and dx are written over those
of the call before, which are donated:

    result = f(x, dy, y, dx)    reads x and dy, writes to where y and dx are
    y, dx = result              and so on

x and dy themselves are not written over. To put y where x is, XLA would first copy x, which the
backward pass needs; and after some calls such an x is zero but for a few large values.

What is left is where the arrays lie. With a power of two in size, one after the other in kept
memory, they are apart by just that and a few cache lines, and get in each other's way: a plain
addition of two such arrays, in NumPy, takes up to 3 times as long as where they are 4 KiB
further apart. So there are powers of three as N, too: were it the layer that does not grow
linearly, they would show it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from . import benchmark_cases, benchmark_progress, benchmark_runs
from .benchmark_cases import Case
from .benchmark_job import Job
from .benchmark_layers import BOTH, OURS, Program
from .benchmark_runs import Row, Runs, Shape


def in_place(case: Case) -> Program:
    """Forward and backward, with y and dx written over those of the call before."""
    function, given = case.functions[BOTH](), case.arguments[BOTH]
    *_, x, _ = given

    def over(given: tuple[Any, ...], y: Array, dx: Array) -> Any:
        return function(*given)

    # An argument that is not used is not passed on, unless kept, and has no memory to give.
    jitted = jax.jit(over, donate_argnames=("y", "dx"), keep_unused=True)
    memory = [jnp.zeros_like(x), jnp.zeros_like(x)]

    def call() -> Any:
        result = jitted(given, *memory)
        y, _, (_, dx) = result
        memory[:] = y, dx
        return result

    return Program(call)


def measure(job: Job) -> Runs:
    """This layer on ever larger arrays of f32."""
    shapes = [(n, 64, 16, 16) for n in job.growth]
    programs: dict[Shape, Program] = {}
    for shape in shapes:
        given = benchmark_cases.numbers(shape)
        programs[shape] = in_place(benchmark_cases.case(OURS, given, "f32"))
    times = benchmark_progress.interleave("growth", programs, max(1, job.rounds // 2))
    return [
        Row(
            "growth",
            shape,
            "f32",
            OURS,
            BOTH,
            **benchmark_runs.summary(taken.seconds),
            calls=taken.calls,
        )
        for shape, taken in times.items()
    ]
