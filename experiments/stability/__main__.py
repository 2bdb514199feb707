"""The stability experiment of Equinox issue #659, on MNIST.

    python -m experiments.stability                 the whole job: about 2 minutes, 2 cores
    python -m experiments.stability --quick         under 30 seconds; fails if a claim fails
    python -m experiments.stability --network large --steps 300
    python -m experiments.stability --redraw        the committed tables and figures again

Trains the network of the issue with every approach to batch normalisation, from several
seeds; draws the gradient norms and losses step by step; and states for each claim of the
issue what was measured and whether it holds.

https://github.com/patrick-kidger/equinox/issues/659
"""

import argparse
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import numpy as np

from eqx_norm import BatchNorm
from experiments.lab import curves, mnist, rows, training
from experiments.lab.claims import judge, verdicts_table
from experiments.lab.experiment import Experiment, Files, Report, number_from
from experiments.lab.networks import MakeNorm
from experiments.lab.tables import grid
from experiments.lab.training import GradientNorms

from .claims import CLAIMS, FIRST_STEPS, mean_loss, peak
from .figures import draw
from .runs import BATCH, COMPARED, EMA, FIGURE_1, NO_NORM, SETTINGS, Gradient, Setting, Step


@dataclasses.dataclass(frozen=True)
class Job(training.Job):
    """Says what to run. The whole job by default; 100 steps and batch 64 are the issue's."""

    settings: tuple[Setting, ...] = SETTINGS
    steps: int = 100
    # Test accuracy after these steps: early on, inference is where approaches differ.
    evaluated: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def make_norm(setting: Setting) -> MakeNorm:
    if setting == NO_NORM:
        return lambda channels: eqx.nn.Identity()
    return lambda channels: BatchNorm(
        channels, training.AXIS, momentum=setting.momentum, approach=setting.approach
    )


def measure(job: Job, files: Files) -> dict[str, Any]:
    """Trains every setting from every seed."""
    found: list[Step] = []
    norms: defaultdict[Setting, dict[int, GradientNorms]] = defaultdict(dict)  # by seed
    for setting, seed, record in training.runs(
        job, job.settings, make_norm, job.steps, job.evaluated
    ):
        found += curves.steps(Step, setting, seed, record.curves)
        norms[setting][seed] = record.gradient_norms
    rows.save(files.csv(), Step, found)
    rows.save(files.csv("_gradients"), Gradient, gradients(norms))
    return {**job.noted(), "steps": job.steps}


def gradients(norms: Mapping[Setting, dict[int, GradientNorms]]) -> Iterator[Gradient]:
    """Yields what figure 1 shows, of one seed.

    It is the seed of which ema at 0.99 has the median peak: neither the best nor the worst to
    be had.
    """
    peaks = {
        seed: max(norm[:FIRST_STEPS].max() for norm in of_parameter.values())
        for seed, of_parameter in norms[EMA].items()
    }
    seed = sorted(peaks, key=peaks.__getitem__)[len(peaks) // 2]
    for setting in filter(norms.__contains__, FIGURE_1):
        of_parameter = norms[setting][seed]
        for module in dict.fromkeys(name.rpartition(".")[0] for name in of_parameter):
            pairs = (of_parameter[f"{module}.{kind}"] for kind in ("weight", "bias"))
            for step, values in enumerate(zip(*pairs, strict=True), start=1):
                yield Gradient(*setting, seed, step, module, *map(float, values))


def report(files: Files) -> Report:
    """Returns the medians over the seeds of what the claims are about, and the verdicts."""
    runs = curves.by_setting(rows.load(files.csv(), Step), Setting)
    settings = grid(
        "setting",
        {setting.label: run for setting, run in runs.items()},
        {
            f"peak gradient norm, steps 1-{FIRST_STEPS}": (peak, ".2f"),
            "mean loss": (mean_loss, ".3f"),
            "test accuracy": (lambda run: run["test_accuracy"][:, -1], ".1%"),
        },
        lambda run, column: format(np.median(column[0](run)), column[1]),
    )
    verdicts = judge(CLAIMS, runs)
    header = "claim of issue #659", "measured, median (range) over seeds"
    ours, peers = (
        f"`{setting.approach}`: gradients up to {np.median(peak(runs[setting])):.1f}"
        for setting in (BATCH, EMA)
    )
    text = f"{settings}\n\n{verdicts_table(verdicts, *header)}"
    return Report(text, verdicts, ours=ours, peers=peers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    seeds = "of the initial parameters and the order of images (default: 0 1 2 3 4)"
    add("--seeds", nargs="+", type=number_from(0), metavar="N", help=seeds)
    add("--steps", type=number_from(1), metavar="N", help="of each run (default: 100)")
    add(
        "--network",
        choices=("small", "large"),
        help="small: the issue's, one norm layer; large: four convolutions, each normalised; "
        "about three times as long (default: small)",
    )
    mnist.add_argument(parser)


EXPERIMENT = Experiment(
    name="stability",
    about=__doc__,
    whole=Job(),
    quick=Job(settings=COMPARED, seeds=(0, 1), evaluated=()),
    measure=measure,
    report=report,
    draw=draw,
    thread="[Equinox #659](https://github.com/patrick-kidger/equinox/issues/659)",
    add_arguments=add_arguments,
    is_whole=lambda job: job == Job(network=job.network),
    stem=lambda job: "stability" if job.network == "small" else f"stability_{job.network}",
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
