"""The stability experiment of Equinox issue #659, on MNIST.

    python -m experiments.stability                 the whole job: about 2 minutes, 2 cores
    python -m experiments.stability --quick         under 30 seconds; fails if a claim fails
    python -m experiments.stability --approach ema smooth_start --momentum 0.9 --steps 300
    python -m experiments.stability --network large
    python -m experiments.stability --redraw        the committed tables and figures again

Trains the network of the issue with every approach to batch normalisation, from several
seeds; draws the gradient norms and losses step by step; and states for each claim of the
issue what was measured and whether it holds.

https://github.com/patrick-kidger/equinox/issues/659
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import numpy as np
from tqdm import tqdm

from eqx_norm import BatchNorm
from eqx_norm.strategies import NAMED
from experiments.lab import mnist, rows, training
from experiments.lab.claims import judge, verdicts_table
from experiments.lab.experiment import Experiment, Files, Report
from experiments.lab.networks import NETWORKS, MakeNorm
from experiments.lab.tables import table

from .claims import CLAIMS, FIRST_STEPS, mean_loss, peak
from .figures import draw
from .runs import FIGURE_1, NO_NORM, SETTINGS, Gradient, Setting, Step, by_setting


@dataclasses.dataclass(frozen=True)
class Job:
    """What to run. The defaults are the whole job; 100 steps and batch 64 are the issue's."""

    settings: tuple[Setting, ...] = SETTINGS
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    steps: int = 100
    # Test accuracy after these steps: early on, inference is where approaches differ.
    evaluated: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    network: str = "small"
    data: str = "subset"


# What the claims compare, for two seeds.
QUICK = Job(
    settings=(
        Setting("batch", 0.99),
        Setting("ema", 0.99),
        Setting("ema", 0.5),
        Setting("adam", 0.99),
        Setting("smooth_start", 0.99),
        Setting("smooth_start", 0.9999),
    ),
    seeds=(0, 1),
    evaluated=(),
)


def make_norm(setting: Setting) -> MakeNorm:
    if setting.approach == NO_NORM:
        return lambda channels: eqx.nn.Identity()
    return lambda channels: BatchNorm(
        channels, training.AXIS, momentum=setting.momentum, approach=setting.approach
    )


def measure(job: Job, files: Files) -> dict[str, Any]:
    """Trains every setting from every seed."""
    data = mnist.load(job.data)
    records: Records = {}
    total = len(job.settings) * len(job.seeds) * job.steps
    with tqdm(total=total, unit="step", disable=None) as progress:
        for setting in job.settings:
            progress.set_description(f"{setting.label:>20}")
            records[setting] = {
                seed: training.train(
                    NETWORKS[job.network],
                    make_norm(setting),
                    data,
                    seed=seed,
                    steps=job.steps,
                    evaluated=job.evaluated,
                    on_step=progress.update,
                )
                for seed in job.seeds
            }
    rows.save(files.csv(), Step, _steps(records))
    if any(setting in records for setting in FIGURE_1):
        rows.save(files.csv("_gradients"), Gradient, _gradients(records))
    return {
        "seeds": job.seeds,
        "steps": job.steps,
        "network": job.network,
        "data": mnist.kind(job.data),
    }


Records = dict[Setting, dict[int, training.Record]]  # by setting and seed


def _steps(records: Records) -> Iterator[Step]:
    for setting, of_seeds in records.items():
        for seed, record in of_seeds.items():
            columns = (
                record.loss,
                record.largest_gradient_norm,
                record.output_mean,
                record.output_std,
                record.accuracy,
            )
            for step, values in enumerate(zip(*columns, strict=True), start=1):
                yield Step(*setting, seed, step, *map(float, values))


def _gradients(records: Records) -> Iterator[Gradient]:
    """Yields what figure 1 shows, of one seed.

    It is the seed of which ema at 0.99 has the median peak: neither the best nor the worst to
    be had.
    """
    ranked = records.get(Setting("ema", 0.99), next(iter(records.values())))
    peaks = {
        seed: record.largest_gradient_norm[:FIRST_STEPS].max()
        for seed, record in ranked.items()
    }
    seed = sorted(peaks, key=peaks.__getitem__)[len(peaks) // 2]
    for setting in FIGURE_1:
        if setting not in records:
            continue
        norms = records[setting][seed].gradient_norms
        absent = np.full(len(records[setting][seed].loss), np.nan)
        for module in dict.fromkeys(name.rpartition(".")[0] for name in norms):
            pairs = (norms.get(f"{module}.{kind}", absent) for kind in ("weight", "bias"))
            for step, pair in enumerate(zip(*pairs, strict=True), start=1):
                yield Gradient(*setting, seed, step, module, *map(float, pair))


def report(files: Files) -> Report:
    """Returns the medians over the seeds of what the claims are about, and the verdicts."""
    runs = by_setting(rows.load(files.csv(), Step))
    settings = table(
        ("setting", f"peak gradient norm, steps 1-{FIRST_STEPS}", "mean loss", "test accuracy"),
        [
            (
                setting.label,
                f"{np.median(peak(curves)):.2f}",
                f"{np.median(mean_loss(curves)):.3f}",
                f"{np.median(curves.accuracy[:, -1]):.1%}",
            )
            for setting, curves in runs.items()
        ],
    )
    verdicts = judge(CLAIMS, runs)
    claims = verdicts_table(
        verdicts, "claim of issue #659", "measured, median (range) over seeds"
    )
    return Report(f"{settings}\n\n{claims}", verdicts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, whole = parser.add_argument, Job()
    add(
        "--seeds",
        nargs="+",
        type=_natural(0),
        metavar="N",
        help="the seeds: initial parameters and order of images "
        f"(default: {' '.join(map(str, whole.seeds))})",
    )
    add(
        "--steps",
        type=_natural(1),
        metavar="N",
        help=f"training steps of each run (default: {whole.steps})",
    )
    add(
        "--approach",
        nargs="+",
        choices=(NO_NORM, *NAMED),
        metavar="NAME",
        help=f"only these approaches: {', '.join((NO_NORM, *NAMED))}",
    )
    add(
        "--momentum",
        nargs="+",
        type=_momentum,
        metavar="M",
        help="only these momenta, between 0 and 1 (with --approach alone: 0.99)",
    )
    add(
        "--network",
        choices=("small", "large"),
        default=whole.network,
        help="small: the issue's, one norm layer; large: four convolutions, each normalised; "
        "about three times as long (default: small)",
    )
    mnist.add_argument(parser)


def choose(job: Job, options: argparse.Namespace) -> Job:
    settings = job.settings
    if options.approach or options.momentum:
        pairs = itertools.product(options.approach or NAMED, options.momentum or (0.99,))
        settings = tuple(
            dict.fromkeys(Setting(a, 0.0 if a == NO_NORM else m) for a, m in pairs)
        )
    return dataclasses.replace(
        job,
        settings=settings,
        seeds=tuple(dict.fromkeys(options.seeds or job.seeds)),
        steps=options.steps or job.steps,
        network=options.network,
        data=options.data,
    )


def _natural(least: int) -> Callable[[str], int]:
    def natural(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: must be {least} or more")
        return value

    return natural


def _momentum(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be between 0 and 1")
    return value


EXPERIMENT = Experiment(
    name="stability",
    about=__doc__,
    whole=Job(),
    quick=QUICK,
    measure=measure,
    report=report,
    draw=draw,
    quick_help="only what the claims compare, two seeds; exits with 1 if a claim does not hold",
    add_arguments=add_arguments,
    choose=choose,
    is_whole=lambda job: job == Job(network=job.network),
    stem=lambda job: "stability" if job.network == "small" else f"stability_{job.network}",
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
