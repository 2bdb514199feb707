"""The time that each layer takes on the device, beside the others and beside a copy.

The copy is what everything is measured by: bytes read and written, over the time. Of a copy in
JAX, of an elementwise x + 1 in JAX, and of torch's copy where there is one, the fastest counts.
"""

import dataclasses
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future
from typing import Any

import jax
import jax.numpy as jnp

from . import gpu_run_torch
from .benchmark_layers import BOTH, PASSES, Pass
from .gpu_run_contenders import AUTO, OURS_BY, XLA, made_for
from .gpu_run_job import LARGE, Problem
from .gpu_run_programs import Compiled, Noise, Repeated, compiled
from .gpu_run_rows import COPY, Row, timed
from .gpu_run_timing import Timed, interleave
from .gpu_run_torch import COMPILED, TORCH, Torch


@dataclasses.dataclass(frozen=True)
class Setting:
    part: str
    contenders: tuple[str, ...]  # of JAX's and torch's
    rounds: int
    least: float  # seconds a timing
    most_instances: int
    bandwidth: float  # GB/s of a copy
    device: str  # as torch calls it

    def entered(self, problem: Problem, pass_: Pass) -> list[str]:
        """What takes long to compile is not there twice: torch.compile only where it matters,
        and a kernel that is asked for by name only with both passes."""
        absent: set[str] = set()
        if pass_ != BOTH:
            absent |= {COMPILED, *OURS_BY.values()} - {AUTO, XLA}
        if problem.bytes <= LARGE:
            absent |= {COMPILED}
        return [name for name in self.contenders if name not in absent]


def measure(
    problems: Sequence[Problem],
    setting: Setting,
    pool: Executor,
    say: Callable[[str], object],
) -> Iterator[list[Row]]:
    """The rows of one problem after the other."""
    noise = Noise(problems)
    for stage in _stages(problems):
        programs = _compile(stage, setting, pool)
        say(f"compiling {len(programs)} programs, {stage[0].dtype}")
        done = futures.as_completed(programs.values())
        for i, _ in enumerate(done, 1):
            if i % 20 == 0:
                say(f"{i} of {len(programs)}")
        for problem in stage:
            say(f"timing {problem}")
            rows = []
            for pass_ in PASSES:
                rows += _time(problem, pass_, setting, programs, noise)
                gc.collect()  # what was timed, before the next takes memory
                if TORCH in setting.contenders:
                    gpu_run_torch.forget()
            yield rows


Programs = dict[tuple[Problem, Pass, str], Future[Compiled]]


def _stages(problems: Sequence[Problem]) -> Iterable[list[Problem]]:
    """What is compiled together, since nothing should be while something is timed: not all, so
    that there are results early."""
    stages: dict[tuple[str, int], list[Problem]] = {}
    for problem in problems:
        stages.setdefault((problem.dtype, problem.shape[0]), []).append(problem)
    return stages.values()


def _compile(problems: Iterable[Problem], setting: Setting, pool: Executor) -> Programs:
    def task(problem: Problem, pass_: Pass, name: str) -> Compiled:
        instances = problem.instances(setting.most_instances)
        return compiled(made_for(problem, name), problem, pass_, instances)

    return {
        (problem, pass_, name): pool.submit(task, problem, pass_, name)
        for problem in problems
        for pass_ in PASSES
        for name in setting.entered(problem, pass_)
        if name not in (TORCH, COMPILED)
    }


def _time(
    problem: Problem, pass_: Pass, setting: Setting, programs: Programs, noise: Noise
) -> list[Row]:
    instances = problem.instances(setting.most_instances)
    given = noise.given(problem, instances)
    notes: dict[str, str] = {}

    def in_jax(name: str) -> Timed:
        program = programs[problem, pass_, name].result()
        notes[name] = "with a kernel" if program.with_kernel else ""
        return Repeated(program, given)

    def in_torch(name: str) -> Timed:
        layer = Torch(
            problem, pass_, instances, compiled=name == COMPILED, device=setting.device
        )
        notes[name] = layer.note
        return layer

    def make(name: str) -> Callable[[], Timed]:
        return lambda: in_torch(name) if name in (TORCH, COMPILED) else in_jax(name)

    contenders = {name: make(name) for name in setting.entered(problem, pass_)}
    times = interleave(contenders, setting.rounds, setting.least)
    rows = []
    for name, taken in times.items():
        row = Row(
            setting.part,
            problem.name,
            problem.layout,
            problem.dtype,
            pass_,
            name,
            problem.bytes,
        )
        row = dataclasses.replace(row, note=notes.get(name, ""))
        rows.append(timed(row, taken, problem.least_bytes(pass_), setting.bandwidth))
    return rows


def _copy(f: Callable[[Any], Any], size: int) -> Timed:
    x = jax.random.normal(jax.random.key(0), (size // 4,))
    # What is donated has the memory of what is returned, so x is copied to there.
    jitted = jax.jit(lambda _, given, old: f(given[0][0]), donate_argnums=2, keep_unused=True)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jitted.lower([], [(shape,)], shape).compile()
    return Repeated(Compiled(call, [], shape, 1, False), [(x,)])


def copies(size: int, rounds: int, least: float, device: str, *, torch: bool) -> list[Row]:
    """`size` bytes; rows whose value is in GB/s."""
    contenders: dict[str, Callable[[], Timed]] = {
        "JAX, copy": lambda: _copy(jnp.copy, size),
        "JAX, x + 1": lambda: _copy(lambda x: x + 1, size),
    }
    if torch:
        contenders["torch, copy"] = lambda: gpu_run_torch.Copy(size, device)
    rows = []
    for name, times in interleave(contenders, rounds, least).items():
        row = Row(COPY, f"{size / 2**20:g} MiB", "", "f32", COPY, name, size)
        rows.append(timed(row, times, 2 * size, math.nan))
    return rows
