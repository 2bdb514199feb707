"""The measurements of the benchmark, part by part."""

import dataclasses
import math
import statistics
from collections.abc import Callable

from . import (
    benchmark_agreement,
    benchmark_cases,
    benchmark_compiled,
    benchmark_growth,
    benchmark_layers,
    benchmark_parts,
    benchmark_progress,
    benchmark_runs,
    benchmark_torch,
)
from .benchmark_cases import Case
from .benchmark_job import Job
from .benchmark_layers import BOTH, OURS, Pass, Program
from .benchmark_runs import Row, Runs, Shape, named


def _entered(job: Job, dtype: str) -> list[str]:
    """The contestants that can do with the dtype."""
    peers = benchmark_layers.JAX_LAYERS
    return [n for n in job.contestants if n not in peers or dtype in peers[n].dtypes]


def measure_times(job: Job, shape: Shape, dtype: str) -> Runs:
    """All contestants on one shape, and how far their results are from the exact ones."""
    given = benchmark_cases.numbers(shape)
    agreement = benchmark_agreement.Agreement(given, dtype)
    programs: dict[tuple[str, Pass], Program] = {}
    deviations: dict[tuple[str, Pass], float] = {}
    for name in _entered(job, dtype):
        if name == "torch":
            theirs, outputs = benchmark_torch.programs(given, dtype), benchmark_torch.outputs
        else:
            case = benchmark_cases.case(name, given, dtype)
            theirs, outputs = case.programs(), case.outputs
        deviations[name, BOTH] = agreement.deviation(outputs(theirs[BOTH].call()))
        programs |= {(name, pass_): program for pass_, program in theirs.items()}
    for pass_, program in benchmark_parts.parts(given, dtype).items():
        programs[benchmark_parts.PARTS, pass_] = program
    programs[benchmark_parts.COPY, "forward"] = benchmark_parts.copy(given, dtype)
    bar = f"time, {named(shape)} {dtype}"
    times = benchmark_progress.interleave(bar, programs, job.rounds)
    return [
        Row(
            "layer",
            shape,
            dtype,
            name,
            pass_,
            **benchmark_runs.summary(taken.seconds),
            calls=taken.calls,
            deviation=deviations.get((name, pass_), math.nan),
        )
        for (name, pass_), taken in times.items()
    ]


def measure_compilation(job: Job, shape: Shape, dtype: str) -> Runs:
    """Of every JAX contestant, temporaries, and the time to compile forward + backward."""
    given = benchmark_cases.numbers(shape)
    entered = [n for n in _entered(job, dtype) if n in benchmark_layers.JAX_LAYERS]
    cases = {name: benchmark_cases.case(name, given, dtype) for name in entered}
    size = given.x.size * benchmark_layers.DTYPES[dtype].itemsize
    rows = []
    with benchmark_progress.bar(
        f"compile, {named(shape)} {dtype}", len(cases) * (1 + job.compilations)
    ) as step:
        for name, case in cases.items():
            once = benchmark_compiled.compiled(
                case.functions["forward"](), case.arguments["forward"]
            )
            step()
            row = Row("layer", shape, dtype, name, "forward")
            rows.append(dataclasses.replace(row, temporaries=once.temporaries / size))
        several = _compile_in_turn(cases, job.compilations, step)
    for name, compiled in several.items():
        rows.append(
            Row(
                "layer",
                shape,
                dtype,
                name,
                BOTH,
                temporaries=compiled[0].temporaries / size,
                compile_seconds=statistics.median(one.seconds for one in compiled),
            )
        )
    return rows


def _compile_in_turn(
    cases: dict[str, Case], times: int, after: Callable[[], object]
) -> dict[str, list[benchmark_compiled.Compiled]]:
    done: dict[str, list[benchmark_compiled.Compiled]] = {name: [] for name in cases}
    for _ in range(times):
        for name, case in cases.items():
            function, arguments = case.functions[BOTH](), case.arguments[BOTH]
            done[name].append(benchmark_compiled.compiled(function, arguments))
            after()
    return done


def measure_stack(job: Job) -> Runs:
    """The time to compile many blocks of a linear layer, norm and ReLU, both ways."""
    entered = [n for n in (OURS, "equinox batch", "flax linen") if n in job.contestants]
    given = benchmark_cases.numbers(job.stack)
    cases = {name: benchmark_cases.case(name, given, "f32", job.depth) for name in entered}
    with benchmark_progress.bar(
        f"compile {job.depth} layers", len(cases) * job.compilations
    ) as step:
        several = _compile_in_turn(cases, job.compilations, step)
    return [
        Row(
            "stack",
            job.stack,
            "f32",
            name,
            BOTH,
            temporaries=compiled[0].temporaries / given.x.nbytes,
            compile_seconds=statistics.median(one.seconds for one in compiled),
        )
        for name, compiled in several.items()
    ]


def run(job: Job) -> Runs:
    timed: Runs = []
    counted: Runs = []
    for dtype in job.dtypes:
        for shape in job.shapes:
            if "time" in job.measured:
                timed += measure_times(job, shape, dtype)
    for dtype in job.dtypes:
        for shape in job.shapes:
            if "compile" in job.measured:
                counted += measure_compilation(job, shape, dtype)
    runs = benchmark_runs.merge(timed, counted)
    if "growth" in job.measured and OURS in job.contestants:
        runs += benchmark_growth.measure(job)
    if "stack" in job.measured:
        runs += measure_stack(job)
    return runs
