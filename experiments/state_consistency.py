"""Who updates the running statistics of batch normalisation, when, and by what.

    python -m experiments.state_consistency           the whole job: under 2 minutes, 2 cores
    python -m experiments.state_consistency --quick   under 30 seconds; fails if a claim fails

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

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from . import command, results, state_consistency_claims, state_consistency_summary
from .lab.peers.names import OURS
from .state_consistency_layers import (
    ALWAYS,
    EPS,
    LAYERS,
    MOMENTUM,
    UNBIASED,
    Layer,
    implementations,
    missing,
)
from .state_consistency_rows import Row, Setting, save
from .state_consistency_script import SEED, row

NOT_FINITE = ("nan", "inf", "-inf", "3e38")
# The thread's shapes: batch, channels, *spatial. The first is its script's.
SCRIPT, *FEW_VALUES = (1, 2, 3), (1, 6), (1, 6, 5), (1, 6, 1)


@dataclasses.dataclass(frozen=True)
class Job:
    layers: tuple[Layer, ...] = LAYERS
    # Run in every way. The second is a batch of several examples.
    shapes: tuple[tuple[int, ...], ...] = (SCRIPT, (8, 3, 4))
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    not_finite: tuple[str, ...] = NOT_FINITE


WHOLE = Job()
# Only what is installed wherever the package is.
QUICK = Job(ALWAYS, (SCRIPT,), ("float32",), ("nan", "inf"))


def settings(job: Job, of_ours: Sequence[str]) -> Iterator[Setting]:
    """The rows; `of_ours` are the implementations of this layer."""
    for layer in job.layers:
        ours = layer.name in (OURS, UNBIASED)
        for implementation, dtype in itertools.product(of_ours if ours else ("",), job.dtypes):
            made = (layer.name, implementation, dtype)
            for shape, way in itertools.product(job.shapes, layer.ways):
                for backward in (False, True):
                    yield Setting(*made, shape, way, backward)
            for shape in FEW_VALUES:
                yield Setting(*made, shape, layer.usual, True)
            for number in job.not_finite:
                yield Setting(*made, job.shapes[-1], layer.usual, True, number)


def run(job: Job, of_ours: Sequence[str]) -> list[Row]:
    rows = []
    with tqdm([*settings(job, of_ours)], unit="row", disable=None) as progress:
        for setting in progress:
            progress.set_description(f"{setting.layer:>18}")
            rows.append(row(setting))
    return rows


def report(rows: list[Row]) -> tuple[str, list[state_consistency_claims.Verdict]]:
    """The two tables for the terminal and the README, and the verdicts."""
    verdicts = state_consistency_claims.judge(rows)
    words = {True: "holds", False: "DOES NOT HOLD", None: "not run"}
    claims = results.table(
        (f"claim of {OURS}", "measured", "verdict", "not so with"),
        [(v.claim, v.measured, words[v.holds], v.not_so_with) for v in verdicts],
    )
    return f"{state_consistency_summary.table(rows)}\n\n{claims}", verdicts


def raised(rows: list[Row]) -> dict[str, list[str]]:
    """What was raised, and by which batches."""
    found: dict[str, list[str]] = {}
    for setting, outcome in rows:
        if outcome.raised:
            shape = "x".join(map(str, setting.shape))
            where = found.setdefault(f"{setting.layer}: {outcome.raised}", [])
            where.append(f"{setting.dtype} {shape}")
    return {what: list(dict.fromkeys(where)) for what, where in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    job, left_out = _job(options)
    for package in left_out:
        print(f"{package} is not installed: left out (.venv-peers has it)")
    folder = command.folder(parser, options, whole=job == WHOLE) / "results"
    started = time.perf_counter()
    of_ours, cannot = implementations()
    for name, why in cannot.items():
        print(f"implementation={name!r} cannot run here: left out ({why})")
    rows = run(job, of_ours)
    tables, verdicts = report(rows)
    save(folder / "state_consistency.csv", rows)
    seconds = round(time.perf_counter() - started, 1)
    packages = {layer.package for layer in job.layers} & {"flax", "torch"}
    results.write_json(
        folder / "state_consistency.json",
        {
            "environment": results.environment(*sorted(packages)),
            "eps": EPS,
            "momentum": MOMENTUM,
            "seeds": [SEED],
            "implementations": of_ours,
            "implementations that cannot run here": cannot,
            "left out": left_out,
            "seconds": seconds,
            "rows": len(rows),
            "raised": raised(rows),
            "claims": [verdict._asdict() for verdict in verdicts],
        },
    )
    print(f"\n{tables}\n")
    for what, where in raised(rows).items():
        print(f"raises: {what} ({', '.join(where)})")
    print(f"in {seconds} s; {len(rows)} rows in {folder / 'state_consistency.csv'}")
    return int(options.quick and not all(verdict.holds for verdict in verdicts))


def _job(options: argparse.Namespace) -> tuple[Job, tuple[str, ...]]:
    """What to run, and the packages that it does without."""
    job = QUICK if options.quick else WHOLE
    absent = missing(job.layers)
    layers = tuple(layer for layer in job.layers if layer.package not in absent)
    return dataclasses.replace(job, layers=layers), absent


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "state_consistency",
        __doc__,
        quick="fewer rows, no peers but Equinox; exits with 1 if a claim does not hold",
        whole="the whole job with every peer",
        writes="DIR/results",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
