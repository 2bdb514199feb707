"""How accurate batch normalisation is, where it is hard: this layer and its peers.

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

are the largest over the batch, against the same in extended precision from the same values.
In float16 and bfloat16, y and dx may be off by half an ulp, which is free. Compared are
Equinox's, Flax's and PyTorch's layers; those not installed are left out. Then, of this layer,
every approach in training and in inference over many steps (`accuracy_approaches`).

The first case is https://github.com/BVLC/caffe/issues/3963, brought up to date: a channel that
is constant has to come out as zero.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from . import (
    accuracy_approaches,
    accuracy_cases,
    accuracy_claims,
    accuracy_figures,
    accuracy_peers,
    command,
    results,
)
from .accuracy_cases import CONSTANT, COUNT, HALF, ONEFLOW, OUTLIER, RATIO, Case
from .accuracy_measured import Measured, layers_of, save, text
from .accuracy_peers import LAYERS, OURS, Layer
from .accuracy_reference import FAILED, Errors, errors, reference, worst


@dataclasses.dataclass(frozen=True)
class Job:
    cases: tuple[Case, ...] = accuracy_cases.CASES
    layers: tuple[Layer, ...] = LAYERS
    approaches: accuracy_approaches.Job = accuracy_approaches.WHOLE


WHOLE = Job()
# Fewer values a channel, and only what is installed wherever the package is.
QUICK = Job(accuracy_cases.QUICK, accuracy_peers.ALWAYS, accuracy_approaches.QUICK)

# The rows of the summary: what is hard, and the cases that are hard in that way.
SUMMARY = {
    "a constant channel": lambda case: case.group == CONSTANT,
    "mean/std to 1e3": lambda case: case.group == RATIO and case.at <= 1e3,
    "mean/std to 1e7": lambda case: case.group == RATIO,
    "n to 1e6, mean/std 1e3": lambda case: case.group == COUNT,
    "an outlier of 1e6": lambda case: case.group == OUTLIER,
    "OneFlow's pair": lambda case: case.group == ONEFLOW,
    "float16": lambda case: case.group == HALF and case.dtype == "float16",
    "bfloat16": lambda case: case.group == HALF and case.dtype == "bfloat16",
}


def run(job: Job) -> tuple[Measured, dict[str, str]]:
    """The errors of every layer in every case; and why a peer raised, where one did."""
    measured: Measured = {}
    raised: dict[str, str] = {}
    total = sum(case.draws for case in job.cases)
    with tqdm(total=total, unit="batch", disable=None) as progress:
        for case in job.cases:
            progress.set_description(f"{case.name:>28}")
            found: dict[str, list[Errors]] = {layer.name: [] for layer in job.layers}
            for draw in range(case.draws):
                batch = case.batch(draw)
                right = reference(batch)
                for layer in job.layers:
                    try:
                        given = layer.answer(batch)
                    except (TypeError, ValueError) as error:
                        if layer.name == OURS:
                            raise
                        found[layer.name].append(FAILED)
                        reason = str(error).splitlines()[0].partition(". ")[0]
                        why = f"{type(error).__name__}: {reason}"
                        raised[f"{layer.name}, {case.name}"] = why
                    else:
                        found[layer.name].append(errors(batch, right, given))
                progress.update()
            measured[case.name] = {name: worst(of_all) for name, of_all in found.items()}
    return measured, raised


def report(measured: Measured) -> tuple[str, list[accuracy_claims.Verdict]]:
    """The two tables for the terminal and the README, and the verdicts."""
    layers = layers_of(measured)
    rows = []
    for name, about in SUMMARY.items():
        cases = [case for case in measured if about(accuracy_claims.CASES[case])]
        if cases:
            largest = (np.max([measured[case][layer].y for case in cases]) for layer in layers)
            rows.append((name, *map(_cell, largest)))
    summary = results.table(("largest error of y", *layers), rows)
    verdicts = accuracy_claims.judge(measured)
    return f"{summary}\n\n{accuracy_claims.table(verdicts)}", verdicts


def details(measured: Measured) -> str:
    """Case by case: the errors of y and of dx."""
    layers = layers_of(measured)
    return "\n\n".join(
        results.table(
            (f"error of {quantity}", *layers),
            [
                (case, *(_cell(getattr(found[layer], quantity)) for layer in layers))
                for case, found in measured.items()
            ],
        )
        for quantity in ("y", "dx")
    )


def _cell(error: float) -> str:
    return f"{error:.1e}" if np.isfinite(error) and error else text(error)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    job, left_out = _job(options)
    for package in left_out:
        print(f"{package} is not installed: left out (make accuracy has it)")
    out = command.folder(parser, options, whole=job == WHOLE)
    folder = out / "results"
    started = time.perf_counter()
    measured, raised = run(job)
    tables, verdicts = report(measured)
    save(folder / "accuracy.csv", measured)
    by_approach = accuracy_approaches.run(job.approaches)
    more_tables, more_verdicts = accuracy_approaches.report(by_approach)
    verdicts += more_verdicts
    accuracy_approaches.save(folder / "accuracy_approaches.csv", by_approach)
    figure = accuracy_figures.draw(out)
    seconds = round(time.perf_counter() - started, 1)
    packages = {layer.package for layer in job.layers} & {"flax", "torch"}
    results.write_json(
        folder / "accuracy.json",
        {
            "environment": results.environment(*sorted(packages)),
            "bits of the reference's mantissa": np.finfo(np.longdouble).nmant + 1,
            "left out": left_out,
            "seconds": seconds,
            "raised": raised,
            "claims": [verdict._asdict() for verdict in verdicts],
        },
    )
    print(f"\n{details(measured)}\n\n{tables}\n\n{more_tables}\n")
    for where, why in raised.items():
        print(f"fails: {where}: {why}")
    print(f"in {seconds} s; results in {folder}, figure:\n  {figure}")
    return int(options.quick and not all(verdict.holds for verdict in verdicts))


def _job(options: argparse.Namespace) -> tuple[Job, tuple[str, ...]]:
    """What to run, and the packages that it does without."""
    job = QUICK if options.quick else WHOLE
    missing = accuracy_peers.missing(layer.package for layer in job.layers)
    layers = tuple(layer for layer in job.layers if layer.package not in missing)
    return dataclasses.replace(job, layers=layers), missing


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "accuracy",
        __doc__,
        quick="fewer values, no peers but Equinox; exits with 1 if a claim does not hold",
        whole="the whole job with every peer",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
