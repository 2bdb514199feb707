"""Measures how accurate batch normalisation is where that is hard: this layer and its peers.

    python -m experiments.accuracy           the whole job: about two minutes, 2 cores
    python -m experiments.accuracy --quick   under 30 seconds; fails if a claim fails

One training step on each of a set of batches that tell accurate implementations from
inaccurate ones: constant channels, means that are large beside the standard deviation, up to
a million values a channel, outliers, half precision. The errors of output, remembered variance
and gradients are the largest over a batch, beside the answer in extended precision from the
same values; the claims name their units, where xhat = (x - mean) / std, and dy is the gradient
of y. In float16 and bfloat16, y and dx may be off by half an ulp. Then, of this layer, every
approach in training and in inference over many steps (approaches.py).

The first case is https://github.com/BVLC/caffe/issues/3963, brought up to date: a channel that
is constant has to come out as zero.

On a GPU the implementations of both layers of this package are compared instead, with the
channels first and last and as rows; the results are named after the device.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from tqdm import tqdm

from experiments.lab import environment, exact, peers, rows
from experiments.lab.claims import judge, verdicts_table
from experiments.lab.exact import Batch, Exact
from experiments.lab.experiment import Experiment, Files, Report
from experiments.lab.peers import names
from experiments.lab.tables import grid

from . import approaches, cases, claims, figures
from .cases import CONSTANT, COUNT, HALF, ONEFLOW, OUTLIER, RATIO, Case
from .claims import NOT_SERVED, Row
from .layouts import FIRST, LAYOUTS, ROWS

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


@dataclass(frozen=True)
class Job:
    cases: tuple[Case, ...] = cases.CASES
    layers: tuple[str, ...] = PEERS
    layouts: tuple[str, ...] = (FIRST,)
    by_approach: approaches.Job = approaches.WHOLE


WHOLE = Job()
# Fewer values a channel, and the layers that are installed wherever the package is.
QUICK = Job(cases.QUICK, PEERS[:3], by_approach=approaches.QUICK)

Kind = Callable[[Case], bool]
# The rows of the summary: what is hard, and the cases that are hard in that way.
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


def on_device(job: Job) -> Job:
    """Returns the job, or the job of this package's implementations where there is a GPU."""
    if jax.default_backend() == "cpu":
        return job
    return Job(job.cases, (names.OURS, names.OURS_PALLAS), tuple(LAYOUTS), job.by_approach)


def measure(job: Job, files: Files) -> dict[str, Any]:
    measured: list[Row] = []
    # Threads, since most of the time goes into compiling.
    with ThreadPoolExecutor(min(environment.cores(), 16)) as pool:
        for case in tqdm(job.cases, unit="case", disable=None):
            batches = [case.batch(number) for number in range(case.draws)]
            given = [(batch, exact.batch_norm(batch)) for batch in batches]
            # A row of a layer norm has no weight for each channel.
            layouts = [name for name in job.layouts if not (case.affine and name == ROWS)]
            kinds = [(layout, layer) for layout in layouts for layer in job.layers]
            measured += pool.map(partial(_row, case, given), *zip(*kinds, strict=True))
    rows.save(files.csv(), Row, measured, digits=3)
    of_approaches = approaches.measure(job.by_approach)
    rows.save(files.csv("_approaches"), approaches.Row, of_approaches, digits=3)
    return {"bits of the reference's mantissa": exact.MANTISSA}


def _row(case: Case, given: Sequence[tuple[Batch, Exact]], layout: str, layer: str) -> Row:
    """Returns the worst errors of the layer over the batches, or why there are none."""
    answer = LAYOUTS[layout]
    try:
        found = exact.worst([exact.errors(b, right, answer(layer, b)) for b, right in given])
    except Exception as error:  # whatever it is, the others are to be measured
        said = str(error).partition("\n")[0].partition(". ")[0]
        # The kernel may answer that it cannot serve.
        asked = (
            layer == names.OURS_PALLAS
            and isinstance(error, ValueError)
            and "implementation=" in said
        )
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
    raised = "\n".join(
        f"fails: {r.layer}, {r.layout}, {r.case}: {r.raised}" for r in measured if r.raised
    )
    of_layers = rows.by(measured, lambda row: row.layer)
    hard = {layer: _largest(SUMMARY["mean/std to 1e3"], of) for layer, of in of_layers.items()}
    return Report(
        "\n\n".join([*details, *summary, raised]).rstrip(),
        verdicts,
        "\n\n".join(summary),
        ours=f"error of y, mean/std to 1e3: {hard.pop(names.OURS)}",
        peers=", ".join(f"{layer} {error}" for layer, error in hard.items()),
    )


def _tables(
    title: str, measured: Sequence[Row], kinds: Mapping[str, Kind], quantity: str = "y"
) -> str:
    """Returns a table for each layout: a row for each kind of case, a column for each layer."""
    layouts = rows.by(measured, lambda row: row.layout)
    parts = []
    for layout, found in layouts.items():
        said = f"{title}, {layout}" if len(layouts) > 1 else title
        of_layers = rows.by(found, lambda row: row.layer)
        parts.append(grid(said, kinds, of_layers, partial(_largest, quantity=quantity)))
    return "\n\n".join(parts)


def _largest(about: Kind, found: Sequence[Row], quantity: str = "y") -> str:
    of = [row for row in found if about(cases.BY_NAME[row.case])]
    raised = [row.raised for row in of if row.raised]
    if raised:
        return "not served" if all(r.startswith(NOT_SERVED) for r in raised) else "fails"
    if not of:
        return "-"
    error = max(getattr(row, quantity) for row in of)
    return f"{error:.1e}" if error else "0"


def _stem(job: Job) -> str:
    """Returns a stem of its own for the implementations on a device."""
    return "accuracy" if job.layouts == (FIRST,) else f"accuracy_{environment.device_name()}"


EXPERIMENT = Experiment(
    name="accuracy",
    about=__doc__,
    thread="[Caffe #3963](https://github.com/BVLC/caffe/issues/3963): accuracy of batch norm",
    whole=WHOLE,
    quick=QUICK,
    measure=measure,
    report=report,
    draw=figures.draw,
    choose=lambda job, options: on_device(job),
    present=peers.present_layers,
    is_whole=lambda job: job == on_device(WHOLE),
    stem=_stem,
    # On a GPU it is a test of the kernels: its exit code says whether they pass.
    strict=lambda job: job.layouts != (FIRST,),
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
