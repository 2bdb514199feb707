"""The stability experiment of Equinox issue #659, on MNIST.

    python -m experiments.stability                 the whole job: about 2 minutes, 2 cores
    python -m experiments.stability --quick         under 30 seconds; fails if a claim fails
    python -m experiments.stability --approach ema smooth_start --momentum 0.9 --steps 300
    python -m experiments.stability --network large

Trains the network of the issue with every approach to batch normalisation, from several
seeds; draws the gradient norms and losses step by step; and states for each claim of the
issue what was measured and whether it holds.

https://github.com/patrick-kidger/equinox/issues/659
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import equinox as eqx
from tqdm import tqdm

from eqx_norm import BatchNorm
from eqx_norm.strategies import NAMED

from . import (
    command,
    results,
    stability_claims,
    stability_figures,
    stability_runs,
)
from .lab import mnist, training
from .lab.networks import NETWORKS, MakeNorm
from .stability_runs import FIGURE_1, NO_NORM, SETTINGS, Runs, Setting


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

    @property
    def stem(self) -> str:
        return "stability" if self.network == "small" else f"stability_{self.network}"


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


def run(job: Job) -> Runs:
    """Train every setting from every seed."""
    data = mnist.load(job.data)
    runs: Runs = {}
    total = len(job.settings) * len(job.seeds) * job.steps
    with tqdm(total=total, unit="step", disable=None) as progress:
        for setting in job.settings:
            progress.set_description(f"{setting.label:>20}")
            runs[setting] = {
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
    return runs


def save_gradients(path: Path, job: Job, runs: Runs) -> None:
    """Of one seed, the norm of every gradient at every step: figure 1.

    The seed is the one of which ema at 0.99 has the median peak: neither the best nor the
    worst to be had.
    """
    shown = [setting for setting in FIGURE_1 if setting in runs]
    records = runs.get(Setting("ema", 0.99), next(iter(runs.values())))
    ranked = sorted(records, key=lambda seed: stability_claims.peak(records[seed]))
    seed = ranked[len(ranked) // 2]
    network = NETWORKS[job.network]
    names = {s: training.leaf_names(network, make_norm(s)) for s in shown}
    columns = max(names.values(), key=len)
    rows = []
    for setting in shown:
        record = runs[setting][seed]
        for step, (loss, norms) in enumerate(
            zip(record.loss, record.gradient_norms.T, strict=True), start=1
        ):
            cells = dict(zip(names[setting], (f"{norm:.6g}" for norm in norms), strict=True))
            momentum = f"{setting.momentum:g}"
            row = (setting.approach, momentum, seed, step, f"{loss:.6g}")
            rows.append((*row, *(cells.get(column, "") for column in columns)))
    results.write_csv(path, ("approach", "momentum", "seed", "step", "loss", *columns), rows)


def report(runs: Runs) -> tuple[str, list[stability_claims.Verdict]]:
    """The two tables for the terminal and the README, and the verdicts."""
    verdicts = stability_claims.judge(runs)
    verdict_words = {True: "holds", False: "DOES NOT HOLD", None: "not run"}
    claims = results.table(
        ("claim of issue #659", "measured, median (range) over seeds", "verdict"),
        [(v.claim, v.measured, verdict_words[v.holds]) for v in verdicts],
    )
    first = stability_claims.FIRST_STEPS
    summary = results.table(
        ("setting", f"peak gradient norm, steps 1-{first}", "mean loss", "test accuracy"),
        [
            (
                row["setting"],
                f"{row['peak_gradient_norm']:.2f}",
                f"{row['mean_loss']:.3f}",
                f"{100 * row['test_accuracy']:.1f}%",
            )
            for row in stability_claims.summary(runs)
        ],
    )
    return f"{summary}\n\n{claims}", verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    job = _job(options)
    out = command.folder(parser, options, whole=job == Job(network=job.network))
    folder = out / "results"
    started = time.perf_counter()
    try:
        runs = run(job)
    except mnist.DataError as error:
        parser.exit(2, f"{error}\n")
    text, verdicts = report(runs)
    stability_runs.save(folder / f"{job.stem}.csv", runs)
    if any(setting in runs for setting in FIGURE_1):
        save_gradients(folder / f"{job.stem}_gradients.csv", job, runs)
    results.write_csv(folder / f"{job.stem}_claims.csv", verdicts[0]._fields, verdicts)
    figures = stability_figures.draw(out, job.stem)
    seconds = round(time.perf_counter() - started, 1)
    results.write_json(
        folder / f"{job.stem}.json",
        {
            "environment": results.environment("optax"),
            "seeds": job.seeds,
            "steps": job.steps,
            "network": job.network,
            "data": job.data if job.data in ("subset", "download") else "folder",
            "seconds": seconds,
            "settings": stability_claims.summary(runs),
            "claims": [verdict._asdict() for verdict in verdicts],
        },
    )
    print(f"\n{text}\n\nin {seconds} s; results in {folder}, figures:")
    print(*(f"  {figure}" for figure in figures), sep="\n")
    return int(options.quick and not all(verdict.holds for verdict in verdicts))


def _job(options: argparse.Namespace) -> Job:
    job = QUICK if options.quick else Job()
    if options.approach or options.momentum:
        approaches = options.approach or tuple(NAMED)
        pairs = itertools.product(approaches, options.momentum or (0.99,))
        # Without normalisation there is no momentum to vary.
        settings = (Setting(a, 0.0 if a == NO_NORM else m) for a, m in pairs)
        job = dataclasses.replace(job, settings=tuple(dict.fromkeys(settings)))
    return dataclasses.replace(
        job,
        seeds=tuple(dict.fromkeys(options.seeds or job.seeds)),
        steps=options.steps or job.steps,
        network=options.network,
        data=options.data,
    )


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "stability",
        __doc__,
        quick="only what the claims compare, two seeds; exits with 1 if a claim does not hold",
        whole="the whole job",
    )
    whole = Job()
    add = parser.add_argument
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
        choices=tuple(NETWORKS),
        default=whole.network,
        help="small: the issue's, one norm layer; large: four convolutions, each normalised; "
        "about three times as long (default: small)",
    )
    add(
        "--data",
        default=whole.data,
        metavar="SOURCE",
        help="'subset': 10,000 training images of MNIST that are part of this repository "
        "(default); 'download': all of it, from a public mirror; or a folder with the four "
        "IDX files",
    )
    return parser


def _natural(least: int):
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


if __name__ == "__main__":
    sys.exit(main())
