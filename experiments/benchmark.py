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
and how the cost grows with the size of x, in memory that is the program's own (see
benchmark_growth). Last, the targets, each with its number and whether it holds.

On a CPU, a good part of the time of a large array is the system's, that hands out its memory:
it falls on all contestants alike, but most on those with temporaries, and is not the same in
every run. `--memory kept` has the process keep what it frees, and shows the arithmetic.

Flax and torch take part where they are installed: .venv-peers, made by `make test-peers`.
On a GPU, where JAX's default device is one, the files are named after it.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence

from . import (
    benchmark_arguments,
    benchmark_figures,
    benchmark_job,
    benchmark_layers,
    benchmark_parts,
    benchmark_runs,
    benchmark_targets,
    benchmark_timing,
    benchmark_torch,
    command,
    results,
)
from .benchmark_job import Job
from .benchmark_layers import BOTH, PASSES, Pass
from .benchmark_measure import run
from .benchmark_runs import Row, Runs, named


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = benchmark_arguments.parser(__doc__)
    options = parser.parse_args(arguments)
    asked = benchmark_arguments.job(options)
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
    out = command.folder(parser, options, whole=benchmark_job.whole(job))
    folder, name = out / "results", benchmark_job.stem(job)
    started = time.perf_counter()
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


if __name__ == "__main__":
    sys.exit(main())
