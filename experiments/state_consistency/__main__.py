"""Who updates the running statistics of batch normalisation, when, and by what.

    python -m experiments.state_consistency            the whole job: under 2 minutes, 2 cores
    python -m experiments.state_consistency --quick    under 30 seconds; fails if a claim fails
    python -m experiments.state_consistency --redraw   the committed tables again

In https://github.com/apache/mxnet/issues/21111 the answer depends on the device, on whether a
backward pass follows, and on which library computes the layer; and one value per channel gives
NaN. The thread's script is the one here: evaluate, call once in training mode, evaluate again;
then all of it again with another batch. Each row of the matrix runs it in another way: with
and without a backward pass, op by op and under `jax.jit`, `jax.checkpoint` and `lax.scan`, in
two dtypes, with each implementation of this layer; and the same of Equinox's, Flax's and
PyTorch's layers, of which those that are not installed are left out. Measured are

    difference       largest, of the outputs of the evaluations before and after one call
    updates          how many steps of the running average a training call made
    errors           of what an update took in, beside the batch's mean, biased and unbiased
                     variance computed in float64
    memory           what is remembered after each call, to the bit
    nonfinite        how many numbers are NaN or infinite

(Equinox's mode="ema" evaluates by a variance of 0 before its first batch: so its difference is
large. torch.batch_norm is what PyTorch's layer calls, without the check that comes before.)

A row may have one value per channel (n = 1), or in its second batch a number that is NaN,
infinite, or so large that its square is; ten good batches follow that.
"""

import dataclasses
import itertools
import sys
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from eqx_norm import BatchNorm
from experiments.lab import peers, rows
from experiments.lab.claims import verdicts_table
from experiments.lab.experiment import Experiment, Files, Report
from experiments.lab.peers import names

from .claims import CLAIMS
from .row import OURS, Row
from .script import ERRORS, SEED, SHAPE, play, subject
from .subjects import EPS, JIT, MOMENTUM, usual, ways
from .summary import in_short, raised, summary

LAYERS = (
    *OURS,
    *(names.EQUINOX_EMA, names.EQUINOX_BATCH),
    *(names.LINEN, names.NNX),
    *(names.TORCH, names.TORCH_OPERATOR),
)
# All but the one that sums in an order of its own, so that its bits are others.
IMPLEMENTATIONS = tuple(
    name
    for name in typing.get_args(typing.get_type_hints(BatchNorm)["implementation"])
    if name != "device_invariant"
)
FEW_VALUES = (1, 6), (1, 6, 5), (1, 6, 1)  # the thread's, too


@dataclasses.dataclass(frozen=True)
class Job:
    layers: tuple[str, ...] = LAYERS
    implementations: tuple[str, ...] = IMPLEMENTATIONS  # of this package's layer
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
        implementations = job.implementations if layer in OURS else ("",)
        for made in itertools.product((layer,), implementations, job.dtypes):
            for how in itertools.product(job.shapes, ways(layer), (False, True)):
                yield Row(*made, *how)
            for shape in FEW_VALUES:
                yield Row(*made, shape, usual(layer), True)
            for number in job.not_finite:
                yield Row(*made, job.shapes[-1], usual(layer), True, number)


def present(job: Job) -> tuple[Job, dict[str, str]]:
    """Returns the job without the peers and implementations that cannot run here."""
    job, left_out = peers.present_layers(job)
    run = []
    for name in job.implementations:
        row = Row(names.OURS, name, "float32", (2, 1), JIT, backward=True)
        try:
            subject(row).train(np.ones(row.shape, np.float32))
        except ERRORS as error:
            if name in ("auto", "xla"):  # which run everywhere
                raise
            left_out[f"implementation={name!r}"] = f"{type(error).__name__}: {error}"
        else:
            run.append(name)
    return dataclasses.replace(job, implementations=tuple(run)), left_out


def measure(job: Job, files: Files) -> dict[str, Any]:
    progress = tqdm([*settings(job)], unit="row", disable=None)
    rows.save(files.csv(), Row, [play(subject(row), row) for row in progress], digits=9)
    noted = {"eps": EPS, "momentum": MOMENTUM, "seeds": [SEED]}
    return {**noted, "implementations": job.implementations}


def report(files: Files) -> Report:
    """Returns the matrix in a few lines, the verdicts, and what was raised."""
    found = rows.load(files.csv(), Row)
    verdicts = [claim.verdict(found) for claim in CLAIMS]
    tables = f"{summary(found)}\n\n{verdicts_table(verdicts, f'claim of {names.OURS}')}"
    return Report(
        f"{tables}\n\n{raised(found)}",
        verdicts,
        summary=tables,
        ours=in_short([row for row in found if row.layer in OURS]),
        peers=in_short([row for row in found if row.layer not in OURS]),
    )


EXPERIMENT = Experiment(
    name="state_consistency",
    about=__doc__,
    whole=WHOLE,
    quick=QUICK,
    measure=measure,
    report=report,
    thread="[MXNet #21111](https://github.com/apache/mxnet/issues/21111)",
    present=present,
    # Which implementations can run is a question of the device.
    is_whole=lambda job: dataclasses.replace(job, implementations=IMPLEMENTATIONS) == WHOLE,
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
