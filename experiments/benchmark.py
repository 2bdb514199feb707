"""The speed of batch norm + ReLU in training: this layer, Equinox's, Flax's and torch's.

    python -m experiments.benchmark                 the whole job: under 10 minutes, 2 cores
    python -m experiments.benchmark --quick         under 30 seconds; fails if what does not
                                                    depend on the machine does not hold
    python -m experiments.benchmark --only time --shapes 64,64,32,32 --dtype f32 --rounds 10

Times the layer with its running statistics and the ReLU, compiled: forward, and forward and
backward (the gradients in x, weight and bias for a given dy). All contestants run in one
process; in every round each runs once, in an order drawn anew, so that what else the machine
does falls on all of them alike. Compare the numbers of one run with each other, not with
those of another.

Beside the others run a copy of x in memory, and the five passes over x that batch norm cannot
do without, one by one: the sum of its parts. Then what is exact, or nearly: the temporaries
of each compiled program and the time to compile it; the time to compile a stack of 50 layers;
and how the cost grows with the size of x. Last, the targets, each with its number and
whether it holds.

On a CPU, a good part of the time of a large array is the system's, that hands out its memory:
it falls on all contestants alike, but most on those with temporaries, and is not the same in
every run. `--memory kept` has the process keep what it frees, and shows the arithmetic.

Flax and torch take part where they are installed: .venv-peers, made by `make test-peers`.
On a GPU, where JAX's default device is one, the files are named after it.
"""

import argparse
import dataclasses
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
from tqdm import tqdm

from . import (
    benchmark_agreement,
    benchmark_compiled,
    benchmark_figures,
    benchmark_layers,
    benchmark_parts,
    benchmark_runs,
    benchmark_targets,
    benchmark_timing,
    benchmark_torch,
    results,
)
from .benchmark_layers import EQUINOX, FLAX, OURS, PASSES, Pass, Program
from .benchmark_runs import Row, Runs, Shape, named

MEASURED = ("time", "compile", "stack", "growth")
BOTH: Pass = "forward + backward"


@dataclasses.dataclass(frozen=True)
class Job:
    """What to measure. The defaults are the whole job."""

    # [N, C, *spatial]: large and square, many channels, few channels, late in a ResNet at a
    # batch of 8, two without spatial axes, and one with one long one.
    shapes: tuple[Shape, ...] = (
        (64, 64, 32, 32),
        (256, 256, 8, 8),
        (32, 16, 112, 112),
        (16, 32, 4096),
        (8, 512, 7, 7),
        (1024, 128),
        (64, 512),
    )
    dtypes: tuple[str, ...] = ("f32", "bf16")
    contestants: tuple[str, ...] = (OURS, *EQUINOX, *FLAX, "torch")
    rounds: int = 20
    measured: tuple[str, ...] = MEASURED
    # Of a compilation, the median of so many.
    compilations: int = 3
    memory: str = "system"
    stack: Shape = (32, 32, 8, 8)
    depth: int = 50
    # N of [N, 64, 16, 16]: 2^14 to 2^26 values.
    growth: tuple[int, ...] = tuple(2**i for i in range(13))


# What does not depend on the machine: results, and temporaries from 1 MiB on. (Of smaller
# arrays the first level of the sums is a larger part.)
QUICK = Job(
    shapes=((16, 64, 32, 32), (64, 128, 8, 8)),
    dtypes=("f32",),
    contestants=(OURS, *EQUINOX),
    rounds=3,
    measured=("time", "compile"),
    compilations=1,
)


@contextmanager
def _bar(description: str, total: int) -> Iterator[Callable[[], object]]:
    with tqdm(total=total, desc=f"{description:>28}", leave=False, disable=None) as progress:
        yield lambda: progress.update()


def _entered(job: Job, dtype: str) -> list[str]:
    """The contestants that can do with the dtype."""
    peers = benchmark_layers.JAX_LAYERS
    return [n for n in job.contestants if n not in peers or dtype in peers[n].dtypes]


def measure_times(job: Job, shape: Shape, dtype: str) -> Runs:
    """All contestants on one shape, and how far their results are from the exact ones."""
    given = benchmark_layers.numbers(shape)
    agreement = benchmark_agreement.Agreement(given, dtype)
    programs: dict[tuple[str, Pass], Program] = {}
    deviations: dict[tuple[str, Pass], float] = {}
    for name in _entered(job, dtype):
        if name == "torch":
            theirs, outputs = benchmark_torch.programs(given, dtype), benchmark_torch.outputs
        else:
            case = benchmark_layers.case(name, given, dtype)
            theirs, outputs = case.programs(), case.outputs
        deviations[name, BOTH] = agreement.deviation(outputs(theirs[BOTH].call()))
        programs |= {(name, pass_): program for pass_, program in theirs.items()}
    for pass_, program in benchmark_parts.parts(given, dtype).items():
        programs[benchmark_parts.PARTS, pass_] = program
    programs[benchmark_parts.COPY, "forward"] = benchmark_parts.copy(given, dtype)
    total = len(programs) * (benchmark_timing.WARM_UPS + job.rounds)
    with _bar(f"time, {named(shape)} {dtype}", total) as step:
        times = benchmark_timing.interleave(
            programs,
            job.rounds,
            wait_for_each=jax.default_backend() == "cpu",
            after=step,
        )
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
    given = benchmark_layers.numbers(shape)
    entered = [n for n in _entered(job, dtype) if n in benchmark_layers.JAX_LAYERS]
    cases = {name: benchmark_layers.case(name, given, dtype) for name in entered}
    size = given.x.size * benchmark_layers.DTYPES[dtype].itemsize
    rows = []
    with _bar(f"compile, {named(shape)} {dtype}", len(cases) * (1 + job.compilations)) as step:
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
    cases: dict[str, benchmark_layers.Case], times: int, after: Callable[[], object]
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
    given = benchmark_layers.numbers(job.stack)
    cases = {name: benchmark_layers.case(name, given, "f32", job.depth) for name in entered}
    with _bar(f"compile {job.depth} layers", len(cases) * job.compilations) as step:
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


def measure_growth(job: Job) -> Runs:
    """This layer on ever larger arrays of f32."""
    shapes = [(n, 64, 16, 16) for n in job.growth]
    programs: dict[Shape, Program] = {}
    for shape in shapes:
        programs[shape] = benchmark_layers.case(
            OURS, benchmark_layers.numbers(shape), "f32"
        ).program(BOTH)
    rounds = max(1, job.rounds // 2)
    total = len(programs) * (benchmark_timing.WARM_UPS + rounds)
    with _bar("growth", total) as step:
        times = benchmark_timing.interleave(
            programs, rounds, wait_for_each=jax.default_backend() == "cpu", after=step
        )
    return [
        Row(
            "growth",
            shape,
            "f32",
            OURS,
            BOTH,
            **benchmark_runs.summary(times[shape].seconds),
            calls=times[shape].calls,
        )
        for shape in shapes
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
        runs += measure_growth(job)
    if "stack" in job.measured:
        runs += measure_stack(job)
    return runs


# --- What is said about it.


def _order(runs: Runs) -> list[str]:
    every = (*Job().contestants, benchmark_parts.PARTS, benchmark_parts.COPY)
    return [name for name in every if any(row.contestant == name for row in runs)]


def _cells(
    runs: Runs, names: Sequence[str], of: Callable[[Row], float], form: str
) -> list[tuple[str, ...]]:
    """One row per shape, one column per contestant."""
    values = {(row.shape, row.contestant): of(row) for row in runs}
    cells = []
    for shape in dict.fromkeys(row.shape for row in runs):
        row = [values.get((shape, name), math.nan) for name in names]
        cells.append((named(shape), *("-" if math.isnan(v) else format(v, form) for v in row)))
    return cells


def times(runs: Runs, dtype: str, pass_: Pass) -> str:
    """Medians, in milliseconds, three digits."""
    mine = [
        row
        for row in runs
        if (row.part, row.dtype, row.program) == ("layer", dtype, pass_)
        # A copy is what it is, whatever is done with x.
        or (row.part, row.dtype, row.contestant) == ("layer", dtype, benchmark_parts.COPY)
    ]
    names = _order(mine)
    header = (f"ms, {dtype}, {pass_}", *names)
    return results.table(header, _cells(mine, names, lambda row: row.median, "#.3g"))


def counts(runs: Runs, dtype: str) -> str:
    """Temporaries of forward + backward, and seconds to compile it."""
    mine = [r for r in runs if (r.part, r.dtype, r.program) == ("layer", dtype, BOTH)]
    mine = [row for row in mine if not math.isnan(row.temporaries)]
    names = _order(mine)
    space = _cells(mine, names, lambda row: row.temporaries, ".2f")
    seconds = _cells(mine, names, lambda row: row.compile_seconds, ".2f")
    return results.table(
        (f"temporaries / bytes of x; s to compile; {dtype}", *names),
        [
            (shape, *(f"{a}; {b}" for a, b in zip(of_space, of_seconds, strict=True)))
            for (shape, *of_space), (_, *of_seconds) in zip(space, seconds, strict=True)
        ],
    )


def stacks(runs: Runs) -> str:
    mine = [row for row in runs if row.part == "stack"]
    names = _order(mine)
    header = ("s to compile 50 x (linear, norm, ReLU), forward + backward", *names)
    return results.table(header, _cells(mine, names, lambda row: row.compile_seconds, ".2f"))


def verdicts(runs: Runs) -> str:
    words = {True: "holds", False: "DOES NOT HOLD", None: "not run"}
    return results.table(
        ("target", "measured", "verdict"),
        [(v.target, v.measured, words[v.holds]) for v in benchmark_targets.judge(runs)],
    )


def summary(runs: Runs) -> str:
    """The two tables of the README."""
    return f"{times(runs, 'f32', BOTH)}\n\n{verdicts(runs)}"


def report(runs: Runs) -> str:
    """All tables."""
    tables = []
    for dtype in dict.fromkeys(row.dtype for row in runs if row.part == "layer"):
        mine = [row for row in runs if (row.part, row.dtype) == ("layer", dtype)]
        if any(row.calls for row in mine):
            tables += [times(runs, dtype, pass_) for pass_ in PASSES]
        if any(not math.isnan(row.temporaries) for row in mine):
            tables.append(counts(runs, dtype))
    if any(row.part == "stack" for row in runs):
        tables.append(stacks(runs))
    return "\n\n".join([*tables, verdicts(runs)])


def stem(job: Job) -> str:
    """Results of a GPU are kept beside those of a CPU."""
    device = jax.devices()[0]
    kind = "" if device.platform == "cpu" else device.device_kind
    words = (kind, "kept memory" if job.memory == "kept" else "")
    names = (re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in words)
    return "_".join(["benchmark", *filter(None, names)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    asked = _job(options)
    # First of all: once JAX runs, its threads have their memory from elsewhere.
    if asked.memory == "kept" and not benchmark_timing.keep_memory():
        parser.exit(2, "--memory kept: this needs the GNU C library\n")
    present, missing = benchmark_layers.available(asked.contestants)
    if "torch" in present and not benchmark_torch.usable():
        present.remove("torch")
        print("torch is left out: JAX runs on a GPU, and this torch has none.")
    if missing:
        print(f"{', '.join(missing)}: not installed here (it is in .venv-peers); left out.")
    if not present:
        parser.exit(2, "--contestants: none of them can run here\n")
    job = dataclasses.replace(asked, contestants=tuple(present))
    out: Path = options.out or _default_out(job)
    folder, name = out / "results", stem(job)
    started = time.perf_counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)  # rather now than after the measurements
    except OSError as error:
        parser.exit(2, f"--out {out}: {folder} cannot be made ({error.strerror})\n")
    runs = run(job)
    benchmark_runs.save(folder / f"{name}.csv", runs)
    runs = benchmark_runs.load(folder / f"{name}.csv")  # to its digits: tables, too
    seconds = round(time.perf_counter() - started, 1)
    figures = benchmark_figures.draw(out, name)
    judged = benchmark_targets.judge(runs)
    packages = {n.split()[0] for n in present} & {"flax", "torch"}
    results.write_json(
        folder / f"{name}.json",
        {
            "environment": results.environment(*sorted(packages)),
            "rounds": job.rounds,
            "compilations": job.compilations,
            "memory": job.memory,
            "measured": job.measured,
            "seconds": seconds,
            "targets": [verdict._asdict() for verdict in judged],
        },
    )
    print(f"\n{report(runs)}\n\nin {seconds} s; results in {folder}, figures:")
    print(*(f"  {figure}" for figure in figures), sep="\n")
    required = {benchmark_targets.SAME, benchmark_targets.LEAN}
    failed = [v for v in judged if v.target in required and not v.holds]
    return int(options.quick and bool(failed))


def _default_out(job: Job) -> Path:
    """Only the whole job, with every contestant, may replace the committed results."""
    whole = dataclasses.replace(Job(), rounds=max(job.rounds, Job().rounds), memory=job.memory)
    if jax.default_backend() != "cpu":  # torch has a GPU only if it is installed for one
        whole = dataclasses.replace(whole, contestants=job.contestants)
    if job == whole:
        return Path(os.path.relpath(results.FOLDER.parent))
    return Path("build/benchmark")


def _job(options: argparse.Namespace) -> Job:
    job = QUICK if options.quick else Job()
    return dataclasses.replace(
        job,
        shapes=tuple(dict.fromkeys(options.shapes or job.shapes)),
        dtypes=tuple(dict.fromkeys(options.dtype or job.dtypes)),
        contestants=tuple(dict.fromkeys(options.contestants or job.contestants)),
        rounds=options.rounds or job.rounds,
        memory=options.memory,
        measured=tuple(dict.fromkeys(options.only or job.measured)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole = Job()
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help="two shapes in f32, without Flax and torch; exits with 1 if the results "
        "differ by more than 1e-4 or this layer needs temporaries of more than 0.1 of x",
    )
    add(
        "--shapes",
        nargs="+",
        type=_shape,
        metavar="N,C,...",
        help="of x: batch, channels, spatial axes "
        f"(default: {' '.join(','.join(map(str, shape)) for shape in whole.shapes)})",
    )
    add(
        "--dtype",
        nargs="+",
        choices=tuple(benchmark_layers.DTYPES),
        help="of x, y and dy; weights and statistics are f32 (default: both)",
    )
    add(
        "--contestants",
        nargs="+",
        choices=whole.contestants,
        metavar="NAME",
        help="only these: " + ", ".join(f"'{name}'" for name in whole.contestants),
    )
    add(
        "--rounds",
        type=_natural,
        metavar="N",
        help=f"timings of each program, after {benchmark_timing.WARM_UPS} that do not count "
        f"(default: {whole.rounds})",
    )
    add(
        "--only",
        nargs="+",
        choices=MEASURED,
        metavar="PART",
        help="only these parts: time; compile (temporaries and time to compile, per shape); "
        f"stack (time to compile {whole.depth} layers); growth (time over size)",
    )
    add(
        "--memory",
        choices=("system", "kept"),
        default=whole.memory,
        help="system: freed arrays go where the C library sends them (default); kept: they "
        "stay with the process (glibc only)",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="writes DIR/results and DIR/figures (default: experiments for the whole job, "
        "build/benchmark for anything else)",
    )
    return parser


def _shape(text: str) -> Shape:
    try:
        shape = benchmark_runs.shape_of(text)
    except ValueError:
        shape = ()
    if len(shape) < 2 or min(shape) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be N,C,*spatial, of 1 or more, for example 64,64,32,32"
        )
    return shape


def _natural(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return value


if __name__ == "__main__":
    sys.exit(main())
