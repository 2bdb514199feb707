"""Measures how accurate batch normalisation is where that is hard: this layer and its peers.

    python -m experiments.accuracy           the whole job: about two minutes, 2 cores
    python -m experiments.accuracy --quick   under 30 seconds; fails if a claim fails

One training step on each of a set of batches that tell accurate implementations from
inaccurate ones: constant channels, means that are large beside the standard deviation, up to
a million values a channel, outliers, half precision. The errors of

    y          the output                in units of max(1, abs(xhat)), xhat = (x - mean) / std
    variance   as the layer remembers    of variance + eps
    dx         the input's gradient      of max abs(dy) * weight / std, dy the gradient of y
    dweight    the weight's              of sum abs(dy) + 4.3 abs(dweight)
    dbias      the bias's                of sum abs(dy)
    nonfinite  how many of these numbers are NaN or infinite

are the largest over the batch, against the answer in extended precision from the same values.
In float16 and bfloat16, y and dx may be off by half an ulp. Compared are Equinox's, Flax's and
PyTorch's layers. Then, of this layer, every approach in training and in inference over many
steps (approaches.py).

The first case is https://github.com/BVLC/caffe/issues/3963, brought up to date: a channel that
is constant has to come out as zero.

On a GPU the implementations of both layers of this package are compared instead, with the
channels first and last and as rows; the results are named after the device, and leave those of
a CPU as they are. `--implementations` rehearses that on a CPU.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from experiments.lab import environment, exact, peers, rows
from experiments.lab.claims import judge, verdicts_table
from experiments.lab.exact import Batch, Exact
from experiments.lab.experiment import Experiment, Files, Report
from experiments.lab.peers import names
from experiments.lab.tables import grid

from . import approaches, cases, claims, figures
from .cases import CONSTANT, COUNT, HALF, ONEFLOW, OUTLIER, RATIO, Case
from .layouts import FIRST, LAYOUTS, ROWS
from .rows import NOT_SERVED, Row

PEERS = (
    names.OURS,
    names.EQUINOX_EMA,
    names.EQUINOX_BATCH,
    names.LINEN,
    names.NNX,
    names.LINEN_TWO_PASS,
    names.NNX_TWO_PASS,
    names.TORCH,
)
KERNELS = (names.OURS_TRITON, names.OURS_MOSAIC)
IMPLEMENTATIONS = (names.OURS, names.OURS_XLA, *KERNELS)


@dataclass(frozen=True)
class Job:
    cases: tuple[Case, ...] = cases.CASES
    layers: tuple[str, ...] = PEERS
    layouts: tuple[str, ...] = (FIRST,)
    by_approach: approaches.Job = approaches.WHOLE

    @property
    def of_implementations(self) -> "Job":
        """Returns the job with this package's implementations in place of the peers."""
        return replace(self, layers=IMPLEMENTATIONS, layouts=tuple(LAYOUTS))


WHOLE = Job()
# Fewer values a channel, and the layers that are installed wherever the package is.
QUICK = Job(cases.QUICK, PEERS[:3], by_approach=approaches.QUICK)

# The rows of the summary: what is hard, and the cases that are hard in that way.
Kind = Callable[[Case], bool]
SUMMARY: dict[str, Kind] = {
    "a constant channel": lambda case: case.group == CONSTANT,
    "mean/std to 1e3": lambda case: case.group == RATIO and case.at <= 1e3,
    "mean/std to 1e7": lambda case: case.group == RATIO,
    "n to 1e6, mean/std 1e3": lambda case: case.group == COUNT,
    "an outlier of 1e6": lambda case: case.group == OUTLIER,
    "OneFlow's pair": lambda case: case.group == ONEFLOW,
    "float16": lambda case: case.group == HALF and case.dtype == "float16",
    "bfloat16": lambda case: case.group == HALF and case.dtype == "bfloat16",
}


def measure(job: Job, files: Files) -> dict[str, Any]:
    measured: list[Row] = []
    # Threads, since most of the time goes into compiling.
    with ThreadPoolExecutor(min(environment.cores(), 16)) as pool:
        for case in (progress := tqdm(job.cases, unit="case", disable=None)):
            progress.set_description(f"{case.name:>28}")
            batches = [case.batch(number) for number in range(case.draws)]
            given = [(batch, exact.batch_norm(batch)) for batch in batches]
            # A row of a layer norm has no weight for each channel.
            layouts = [name for name in job.layouts if not (case.affine and name == ROWS)]
            kinds = [(layout, layer) for layout in layouts for layer in job.layers]
            found = [pool.submit(_row, case, *kind, given) for kind in kinds]
            measured += [row.result() for row in found]
            # After each case, so that a run that is cut short has something to show.
            rows.save(files.csv(), Row, measured, digits=3)
    of_approaches = approaches.measure(job.by_approach)
    rows.save(files.csv("_approaches"), approaches.Row, of_approaches, digits=3)
    return {"bits of the reference's mantissa": exact.MANTISSA}


def _row(case: Case, layout: str, layer: str, given: Sequence[tuple[Batch, Exact]]) -> Row:
    """Returns the worst errors of the layer over the batches, or why there are none."""
    play = LAYOUTS[layout]
    try:
        found = exact.worst([exact.errors(b, right, play(layer, b)) for b, right in given])
    except Exception as error:  # whatever it is, the others are to be measured
        said = str(error).partition("\n")[0].partition(". ")[0]
        # Where it is asked for by name, a kernel may answer that it cannot serve.
        asked = layer in KERNELS and isinstance(error, ValueError) and "implementation=" in said
        kind = NOT_SERVED if asked else f"{type(error).__name__}: "
        return Row(case.name, layout, layer, raised=kind + said)
    return Row(case.name, layout, layer, *found)


def report(files: Files) -> Report:
    measured = rows.load(files.csv(), Row)
    of_approaches = rows.load(files.csv("_approaches"), approaches.Row)
    verdicts = judge(claims.CLAIMS, measured)
    verdicts += judge([claims.EVERY_APPROACH], of_approaches)
    each_case = {row.case: cases.BY_NAME[row.case].__eq__ for row in measured}
    details = [_tables(f"error of {q}", measured, each_case, q) for q in ("y", "dx")]
    summary = [
        _tables("largest error of y", measured, SUMMARY),
        approaches.table(of_approaches),
        verdicts_table(verdicts, f"claim of {names.OURS}", "worst that was measured"),
    ]
    raised = [
        f"fails: {r.layer}, {r.layout}, {r.case}: {r.raised}" for r in measured if r.raised
    ]
    of_layers = rows.by(measured, lambda row: row.layer)
    hard = {layer: _largest(SUMMARY["mean/std to 1e3"], of) for layer, of in of_layers.items()}
    return Report(
        "\n\n".join([*details, *summary, "\n".join(raised)]).rstrip(),
        verdicts,
        "\n\n".join(summary),
        ours=f"error of y, mean/std to 1e3: {hard.pop(names.OURS)}",
        peers=", ".join(f"{layer} {error}" for layer, error in hard.items()),
    )


def _tables(
    title: str, measured: Sequence[Row], kinds: Mapping[str, Kind], quantity: str = "y"
) -> str:
    """Returns a table for each layout: a row for each kind of case, a column for each layer."""
    layers = dict.fromkeys(row.layer for row in measured)
    layouts = rows.by(measured, lambda row: row.layout)
    parts = []
    for layout, mine in layouts.items():
        of_layers = {layer: [row for row in mine if row.layer == layer] for layer in layers}
        said = f"{title}, {layout}" if len(layouts) > 1 else title
        parts.append(grid(said, kinds, of_layers, partial(_largest, quantity=quantity)))
    return "\n\n".join(parts)


def _largest(about: Kind, found: Sequence[Row], quantity: str = "y") -> str:
    of = [row for row in found if about(cases.BY_NAME[row.case])]
    raised = [row for row in of if row.raised]
    if raised:
        return "fails" if any(row.served for row in raised) else "not served"
    error = max((getattr(row, quantity) for row in of), default=None)
    if error is None:
        return "-"
    return f"{error:.1e}" if error and np.isfinite(error) else f"{error:g}"


def _present(job: Job) -> tuple[Job, dict[str, str]]:
    job, left_out = peers.present_layers(job)
    if jax.default_backend() == "cpu":
        left_out |= {name: "a kernel is for a GPU" for name in job.layers if name in KERNELS}
    return replace(job, layers=tuple(n for n in job.layers if n not in left_out)), left_out


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--implementations",
        action="store_true",
        help="compares this package's implementations rather than its peers, which is what is "
        "done wherever there is more than a CPU",
    )


def _choose(job: Job, options: argparse.Namespace) -> Job:
    on_cpu = jax.default_backend() == "cpu"
    return job.of_implementations if options.implementations or not on_cpu else job


def _stem(job: Job) -> str:
    """Returns a stem of its own for the implementations on a device."""
    if job.layouts == WHOLE.layouts:
        return EXPERIMENT.name
    return f"{EXPERIMENT.name}_{environment.device_name()}"


EXPERIMENT = Experiment(
    name="accuracy",
    about=__doc__,
    thread="[Caffe #3963](https://github.com/BVLC/caffe/issues/3963): accuracy of batch norm",
    whole=WHOLE,
    quick=QUICK,
    measure=measure,
    report=report,
    draw=figures.draw,
    add_arguments=_add_arguments,
    choose=_choose,
    present=_present,
    is_whole=lambda job: job in (WHOLE, WHOLE.of_implementations),
    stem=_stem,
    # On a GPU it is a test of the kernels: its exit code says whether they pass.
    strict=lambda job: job.layouts != WHOLE.layouts,
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
