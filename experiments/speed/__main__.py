"""Times batch norm and layer norm in training: this package's, and its peers'.

    python -m experiments.speed                  on a CPU: under 10 minutes, 2 cores
    python -m experiments.speed --quick          under 30 seconds; fails if what does not depend
                                                 on the machine does not hold
    python -m experiments.speed --memory kept    on a CPU, see below
    python -m experiments.speed --device gpu     on a GPU; exits with 1 if a claim does not hold
    python -m experiments.speed --device rehearsal
                                                 what is done on a GPU, in small on a CPU
    python -m experiments.speed --only time --shapes 64,64,32,32 --dtype f32 --rounds 10

It times batch norm with its running statistics and a ReLU, layer norm, and the training step of
a network in the manner of ResNet-50: forward, and forward and backward (the gradients of x,
weight and bias for a given dy). First it checks that all that is timed computes the same. In
every round each peer runs once, in an order drawn anew, so that what else the machine does
falls on all of them alike. Compare the numbers of one run with each other, not with those of
another.

On a CPU it also times a copy of x in memory, and the five passes over x that batch norm cannot
do without, one by one: the sum of its parts. It counts the temporaries of each program, and
measures the time to compile it and a stack of 50 layers, and how the cost grows with the size
of x. Where an array is large, the system, which hands out its memory, takes a good part of the
time: most from those with temporaries, and another in every run. With `--memory kept` the
process keeps what it frees, and the times are those of the arithmetic.

On a GPU the arrays are those of a ResNet-50 at batches of 32 and 256, channels first and last,
and rows of 768 to 16384 values, several instances of each, so that neither the host's calls nor
the cache of the device are what is measured. Beside each time stands the share of a copy's
bandwidth that it comes to with the least that has to move. PyTorch runs eagerly and, from
100 MB on, compiled. The bits of 100 runs are compared before anything is timed.

Results are written after each step. Where a peer raises, its row says so, and the others go on.
Flax and PyTorch take part where they are installed: in .venv-peers, which `make test-peers`
makes.
"""

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterable

import jax

from experiments.lab import peers, timer
from experiments.lab import rows as csv
from experiments.lab.claims import verdicts_table
from experiments.lab.environment import device_name
from experiments.lab.errors import UserError
from experiments.lab.experiment import Experiment, Files, Report, number_from, with_options
from experiments.lab.tables import grid, table

from . import cases
from .cases import BOTH, JOBS, OWN, PARTS, PEERS, ROWS, Job, Shape, shape_name
from .claims import Rows, ratios, verdicts
from .figures import draw
from .measure import measure
from .programs import ROOFLINE
from .rows import Row, by_shape, chosen

COLUMNS = (*PEERS, cases.NO_NORM, *reversed(ROOFLINE))
NO_GPU = (
    "--device gpu: JAX finds none here ({found}). Run it on a machine that has one, in an "
    "environment with jax[cuda13] or jax[cuda12] (make gpu sets it up); or rehearse all of it "
    "here, with small arrays and no word on speed: --device rehearsal"
)


def _shape(text: str) -> Shape:
    try:
        shape = tuple(int(size) for size in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if len(shape) < 2 or min(shape) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be N,C,*spatial, of 1 or more, for example 64,64,32,32"
        )
    return shape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=tuple(JOBS), default="cpu", help="where to measure (default: cpu)")
    add("--shapes", nargs="+", type=_shape, metavar="N,C,...", help="of a batch norm's x")
    add("--dtype", dest="dtypes", nargs="+", choices=tuple(cases.DTYPES), help="of x, y and dy")
    among = f"only these: {', '.join(map(repr, PEERS))}"
    add("--peers", "--contestants", nargs="+", choices=PEERS, metavar="NAME", help=among)
    add("--rounds", type=number_from(1), metavar="N", help="timings of each program")
    about = "; ".join(f"{part}: {what}" for part, what in PARTS.items())
    add(
        "--only",
        dest="parts",
        nargs="+",
        choices=tuple(PARTS),
        metavar="PART",
        help=f"only these. {about}",
    )
    add(
        "--memory",
        choices=("system", "kept"),
        default="system",
        help="system: freed arrays go where the C library sends them (default); kept: they "
        "stay with the process (glibc only)",
    )


def choose(job: Job, options: argparse.Namespace) -> Job:
    """Returns what was asked for. Has to be called before JAX finds its devices."""
    # First of all: once JAX runs, its threads have their memory from elsewhere.
    if options.memory == "kept" and not timer.keep_memory():
        raise UserError("--memory kept: this needs the GNU C library")
    jax.config.update("jax_enable_compilation_cache", False)  # compiling is timed
    if options.device == "gpu":
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # the rest is torch's
        try:
            found = jax.devices()[0].platform
        except RuntimeError as error:  # a plugin without a driver
            found = str(error).partition("\n")[0]
        if found != "gpu":
            raise UserError(NO_GPU.format(found=found))
    else:
        jax.config.update("jax_platforms", "cpu")
    whole, quick = JOBS[options.device]
    return with_options(quick if options.quick else whole, options)


def present(job: Job) -> tuple[Job, dict[str, str]]:
    """Returns the job with the peers that can run here, and why the others cannot."""
    kept, left_out = peers.present(job.peers)
    return dataclasses.replace(job, peers=kept), left_out


def is_whole(job: Job) -> bool:
    """Returns whether the job is the whole one; on a GPU with every peer that is there."""
    whole = JOBS[job.device][0]
    if job.device == "gpu":  # torch may be left out of its environment
        whole, _ = present(whole)
    return job.device != "rehearsal" and job == dataclasses.replace(whole, memory=job.memory)


def stem(job: Job) -> str:
    """Returns the stem of its files: results of a GPU are kept beside those of a CPU."""
    device = {"cpu": "", "rehearsal": "rehearsal"}.get(job.device, device_name())
    words = ("speed", device, "kept-memory" if job.memory == "kept" else "")
    return "_".join(filter(None, words))


def report(files: Files) -> Report:
    """Returns all tables; the claims last, so that the end of the output has them."""
    rows = csv.load(files.csv(), Row)
    judged = verdicts(rows)
    claims = verdicts_table(judged)
    timed = [r for r in rows if r.part in ("layer_norm", "time", "training") and r.calls]
    kinds = dict.fromkeys((row.part, row.dtype, row.layout, row.program) for row in timed)
    tables = [_times(timed, *kind) for kind in kinds]
    failed = [f"{r.peer}, {r.part} {r.place}: {r.note}" for r in rows if r.failed]
    tables += [_of_layer_norm(timed), *_compilation(rows), _copies(rows), "\n".join(failed)]
    summary = _times(timed, "time", "f32", OWN, BOTH)
    beside = [v.measured for v in judged if v.claim.startswith(("2.", "3.", "4."))]
    return Report(
        "\n\n".join(filter(None, [*tables, claims])),
        judged,
        summary=f"{summary}\n\n{claims}" if summary else claims,
        ours="batch norm + ReLU, forward + backward: 1",
        peers="its time: " + ", ".join(beside),
    )


def _times(timed: Rows, part: str, dtype: str, layout: str, program: str) -> str:
    """Returns the medians in milliseconds, three digits."""
    mine = chosen(timed, part=part, dtype=dtype, layout=layout, program=program)
    unit = "ms, layer norm" if part == "layer_norm" else "ms"
    if any(not math.isnan(row.share) for row in mine):
        unit += " (*: the host's), share of copy"
    words = (unit, layout if layout not in (OWN, ROWS) else "", dtype, program)
    return _by_peer(", ".join(filter(None, words)), mine, _time)


def _time(row: Row) -> str:
    share = "" if math.isnan(row.share) else f" {row.share:.0%}"
    return f"{row.median:#.3g}{'*' if row.of_host else ''}{share}"


def _compilation(rows: Rows) -> list[str]:
    """Returns temporaries of forward + backward, and seconds to compile it."""
    mine = chosen(rows, part="compile", program=BOTH)
    tables = [
        _by_peer(
            f"temporaries / bytes of x; s to compile; {dtype}",
            chosen(mine, dtype=dtype),
            lambda row: f"{row.temporaries:.2f}; {row.compile_seconds:.2f}",
        )
        for dtype in dict.fromkeys(row.dtype for row in mine)
    ]
    title = "s to compile 50 x (linear, norm, ReLU), forward + backward"
    stack = chosen(rows, part="stack")
    return [*tables, _by_peer(title, stack, lambda row: f"{row.compile_seconds:.2f}")]


def _of_layer_norm(timed: Rows) -> str:
    """Returns this layer norm's time over the others'."""
    found = {
        (f"{name}, {ours.dtype}, {ours.program}", shape_name(ours.shape)): f"{value:.2f}"
        for name in PEERS
        for value, ours, other in ratios(chosen(timed, part="layer_norm"), (name,))
        if other is not ours
    }
    lines, shapes = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    made = grid(
        "layer norm: time, this layer over", lines, shapes, lambda *at: found.get(at, "-")
    )
    return made if found else ""


def _copies(rows: Rows) -> str:
    found = chosen(rows, part="copy")
    body = [(r.peer, r.note or f"{2 * r.bytes / r.median / 1e6:.0f}") for r in found]
    return table(("copy", "GB/s"), body) if body else ""


def _by_peer(title: str, rows: Iterable[Row], cell: Callable[[Row], str]) -> str:
    """Returns a line for each shape and a column for each peer; nothing of no rows."""
    found = {shape_name(shape): peers for shape, peers in by_shape(rows).items()}
    columns = [n for n in COLUMNS if any(n in peers for peers in found.values())]
    made = grid(title, found, columns, lambda peers, n: cell(peers[n]) if n in peers else "-")
    return made if found else ""


EXPERIMENT = Experiment(
    name="speed",
    about=__doc__,
    thread="speed, `make benchmark`",
    whole=Job(),
    quick=cases.QUICK,
    measure=measure,
    report=report,
    draw=draw,
    add_arguments=add_arguments,
    choose=choose,
    present=present,
    is_whole=is_whole,
    stem=stem,
    strict=lambda job: job.device != "cpu",
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
