"""Who updates the running statistics of batch normalisation, when, and by what.

    python -m experiments.state_consistency            the whole job: under 2 minutes, 2 cores
    python -m experiments.state_consistency --quick    under 30 seconds; fails if a claim fails
    python -m experiments.state_consistency --redraw   the committed tables again

In https://github.com/apache/mxnet/issues/21111 the answer depends on the device, on whether a
backward pass follows, and on which library computes the layer; and one value per channel gives
NaN. The thread's script is the one here: evaluate, call once in training mode, evaluate again;
then all of it again with another batch. Each row of the matrix runs it in another way: with
and without a backward pass, op by op and under `jax.jit`, `jax.checkpoint` and `lax.scan`, in
two dtypes, with two implementations of this layer; and the same of Equinox's, Flax's and
PyTorch's layers, of which those that are not installed are left out. Measured is what of the
batch an update took in, beside mean, biased and unbiased variance computed in float64; what is
remembered, to the bit; and how far the evaluations before and after the first call differ.

(Equinox's mode="ema" evaluates by a variance of 0 before its first batch: so its difference is
large. torch.batch_norm is what PyTorch's layer calls, without the check that comes before.)

A row may have one value per channel (n = 1), or in its second batch a number that is NaN,
infinite, or so large that its square is; ten good batches follow that.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.lab import peers, rows
from experiments.lab.claims import verdicts_table
from experiments.lab.experiment import Experiment, Files, Report
from experiments.lab.peers import names
from experiments.lab.tables import grid

from .claims import CLAIMS, EPS, FINITE, JIT, MOMENTUM, OP_BY_OP, OURS, Row
from .script import SEED, SHAPE, WAYS, play, subject

LAYERS = (
    *OURS,
    *(names.EQUINOX_EMA, names.EQUINOX_BATCH),
    *(names.LINEN, names.NNX),
    *(names.TORCH, names.TORCH_OPERATOR),
)
IMPLEMENTATIONS = ("auto", "xla")  # of this package's layer; "auto" takes kernels on a GPU
FEW_VALUES = (1, 6), (1, 6, 5), (1, 6, 1)  # the thread's, too


@dataclass(frozen=True)
class Job:
    layers: tuple[str, ...] = LAYERS
    # Run in every way. The second is a batch of several examples.
    shapes: tuple[tuple[int, ...], ...] = (SHAPE, (8, 3, 4))
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    not_finite: tuple[str, ...] = ("nan", "inf", "-inf", "3e38")


WHOLE = Job()
# Only what is installed wherever the package is.
QUICK = Job(LAYERS[:4], shapes=(SHAPE,), dtypes=("float32",), not_finite=("nan", "inf"))


def settings(job: Job) -> Iterator[Row]:
    """Yields the rows, of which nothing is measured yet."""
    for layer in job.layers:
        implementations = IMPLEMENTATIONS if layer in OURS else ("",)
        ways, usual = tuple(WAYS), JIT
        if names.package(layer) == "torch":
            ways, usual = (OP_BY_OP, "checkpoint, op by op"), OP_BY_OP
        for made in itertools.product((layer,), implementations, job.dtypes):
            for how in itertools.product(job.shapes, ways, (False, True)):
                yield Row(*made, *how)
            for shape in FEW_VALUES:
                yield Row(*made, shape, usual, True)
            for number in job.not_finite:
                yield Row(*made, job.shapes[-1], usual, True, number)


def measure(job: Job, files: Files) -> dict[str, Any]:
    progress = tqdm([*settings(job)], unit="row", disable=None)
    rows.save(files.csv(), Row, [play(subject(row), row) for row in progress], digits=9)
    return {"eps": EPS, "momentum": MOMENTUM, "seeds": [SEED]}


def report(files: Files) -> Report:
    """Returns the matrix in a few lines, the verdicts, and what was raised."""
    found = rows.load(files.csv(), Row)
    verdicts = [claim.verdict(found) for claim in CLAIMS]
    of_layers = rows.by(found, lambda row: row.layer)
    tables = (
        grid("layer", of_layers, COLUMNS, lambda mine, cell: cell(mine)),
        verdicts_table(verdicts, f"claim of {names.OURS}"),
    )
    failed = rows.by(
        (row for row in found if row.raised), lambda row: f"{row.layer}: {row.raised}"
    )
    raised = (
        f"raises: {what} ({', '.join(dict.fromkeys(row.values for row in mine))})"
        for what, mine in failed.items()
    )
    return Report(
        "\n\n".join((*tables, "\n".join(raised))),
        verdicts,
        summary="\n\n".join(tables),
        ours=_in_short([row for row in found if row.layer in OURS]),
        peers=_in_short([row for row in found if row.layer not in OURS]),
    )


def _in_short(found: list[Row]) -> str:
    return f"updates a call: {_updates(found)}; memory after NaN: {_bad_batch(found)}"


def _updates(found: list[Row]) -> str:
    counts = [count for row in found for count in (row.updates_1, row.updates_2)]
    return _joined(f"{count:.0f}" for count in counts if np.isfinite(count))


def _difference(found: list[Row]) -> str:
    mine = [row for row in found if (row.dtype, row.shape) == ("float32", SHAPE)]
    return _joined(f"{row.difference:.2f}" for row in mine)


def _variance(dtype: str) -> Callable[[list[Row]], str]:
    def cell(found: list[Row]) -> str:
        several = [row for row in found if row.dtype == dtype and row.n > 1]
        # Where a call is two updates, what one of them took in cannot be told.
        counted = [row for row in several if not row.raised and _updates([row]) == "1"]
        if not counted:
            return "fails" if several else "-"
        kind = "unbiased" if counted[0].unbiased else "biased"
        return f"{kind}, to {max(row.variance_error for row in counted):.0e}"

    return cell


def _one_value(found: list[Row]) -> str:
    def said(row: Row) -> str:
        if row.raised:
            touched = "" if row.memory_0 == row.memory_1 else ", memory changed"
            return row.raised.partition(":")[0] + touched
        return "NaN" if row.nonfinite_training + row.nonfinite_evaluation else "finite"

    # Whether a layer can be run in bfloat16 is another column's.
    return _joined(said(row) for row in found if row.n == 1 and row.dtype == "float32")


def _bad_batch(found: list[Row]) -> str:
    def said(row: Row) -> str:
        if row.nonfinite_later:
            return "lost for ever"
        kept = "kept" if row.memory_1 == row.memory_2 else "changed"
        return kept + (", counted" if row.rejected == 1 else "")

    return _joined(said(row) for row in found if row.batch != FINITE and not row.raised)


def _joined(said: Iterable[str]) -> str:
    return " or ".join(sorted(set(said))) or "-"


COLUMNS = {
    "rows": lambda found: str(len(found)),
    "updates a call": _updates,
    "evaluations differ by": _difference,
    "running variance, float32": _variance("float32"),
    "bfloat16": _variance("bfloat16"),
    "n = 1": _one_value,
    "memory after NaN, inf": _bad_batch,
}

EXPERIMENT = Experiment(
    name="state_consistency",
    about=__doc__,
    whole=WHOLE,
    quick=QUICK,
    measure=measure,
    report=report,
    thread="[MXNet #21111](https://github.com/apache/mxnet/issues/21111)",
    present=peers.present_layers,
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
