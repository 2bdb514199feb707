"""Variance clipping, Ginsburg in Caffe #3963: what it prevents of what it should, on MNIST.

    python -m experiments.variance_clipping           the whole job: under 2 minutes, 2 cores
    python -m experiments.variance_clipping --quick   under 30 seconds; fails if what is found
                                                      here is not found again
    python -m experiments.variance_clipping --redraw  the committed tables and figures again

Trains a small network with `batch`, `ema` and `smooth_start`, each with and without clipping,
and corrupts three training batches in one of several ways. The thread names two failures that
clipping prevents: gradients explode and training accuracy collapses (A); training looks fine,
and test accuracy is ruined by corrupted running statistics (B). `claims.py` defines them in
numbers. For each way, this tells which of them is seen with and without clipping, and what it
costs that a batch of huge variance is divided by a small one.

https://github.com/BVLC/caffe/issues/3963
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array
from tqdm import tqdm

from eqx_norm import BatchNorm
from eqx_norm.strategies import VarianceClip, named
from experiments.lab import curves, mnist, rows, training
from experiments.lab.claims import judge, verdicts_table
from experiments.lab.experiment import Experiment, Files, Report
from experiments.lab.networks import NETWORKS, MakeNorm
from experiments.lab.tables import table

from . import claims
from .corruptions import CLEAN, CONTRAST, CORRUPTIONS, LOUD, ONE_IMAGE, SCALED, corrupted
from .figures import draw, is_drawn
from .runs import CORRUPTED, MOMENTUM, RATIO, START, STEPS, WINDOW, Run, Setting, Step, summary


@dataclass(frozen=True)
class Job:
    """What to run. The defaults are the whole job."""

    approaches: tuple[str, ...] = ("batch", "ema", "smooth_start")
    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    network: str = "perceptron"
    data: str = "subset"

    @property
    def settings(self) -> list[Setting]:
        pairs = itertools.product(self.approaches, (False, True), self.corruptions)
        return [Setting(*one) for one in pairs]


# What is claimed to be found here, for one seed.
QUICK = Job(
    approaches=("batch", "ema"),
    corruptions=(CLEAN, SCALED, CONTRAST, ONE_IMAGE, LOUD),
    seeds=(0,),
)
DRAWN_FROM = 90
# Right before and after the corrupted batches, and in between.
EVALUATED = {*range(DRAWN_FROM, STEPS, 10), *(step - 1 for step in CORRUPTED)}


def make_norm(setting: Setting) -> MakeNorm:
    strategy = named(setting.approach, MOMENTUM)
    if setting.clipped:
        strategy = VarianceClip(strategy, ratio=RATIO, start=START)
    return lambda channels: BatchNorm(channels, training.AXIS, approach=strategy)


def probe(model: Any, state: eqx.nn.State, output: Array, labels: Array) -> dict[str, Array]:
    """Returns training accuracy, and the running variance of the first normalisation layer."""

    def is_norm(node: Any) -> bool:
        return isinstance(node, BatchNorm)

    norm = next(n for n in jax.tree.leaves(model, is_leaf=is_norm) if is_norm(n))
    return {
        "training_accuracy": (output.argmax(axis=1) == labels).mean(),
        "running_variance": norm.approach.infer(state.get(norm.memory_index)).variance.mean(),
    }


def measure(job: Job, files: Files) -> dict[str, Any]:
    """Trains every setting from every seed."""
    data = mnist.load(job.data)
    runs: list[Run] = []
    drawn: list[Step] = []
    total = len(job.settings) * len(job.seeds) * STEPS
    with tqdm(total=total, unit="step", disable=None) as progress:
        for setting, seed in itertools.product(job.settings, job.seeds):
            progress.set_description(f"{setting.layer}, {setting.corruption:>15}")
            record = training.train(
                NETWORKS[job.network],
                make_norm(setting),
                data,
                seed=seed,
                steps=STEPS,
                evaluated=EVALUATED,
                on_step=progress.update,
                change=lambda step, images, how=setting.corruption: (
                    corrupted(images, how) if step in CORRUPTED else images
                ),
                probe=probe,
            )
            runs.append(summary(setting, seed, record.curves))
            if is_drawn(setting):
                steps = curves.steps(Step, setting, seed, record.curves)
                drawn += [step for step in steps if step.step >= DRAWN_FROM]
    rows.save(files.csv(), Run, runs)
    rows.save(files.csv("_curves"), Step, drawn, digits=4)
    return {
        "seeds": job.seeds,
        "steps": STEPS,
        "corrupted steps": CORRUPTED,
        "network": job.network,
        "momentum": MOMENTUM,
        "clipping": {"ratio": RATIO, "start": START},
        "data": mnist.kind(job.data),
    }


LEGEND = f"""\
A1: the largest gradient is more than {claims.EXPLODED:g} times the clean run's.
A2: training accuracy is below {claims.COLLAPSED:.0%} in the {WINDOW} steps after.
B: at the end, training accuracy is within {100 * claims.FINE:g} points of the clean run's,
and test accuracy is {100 * claims.RUINED:g} points or more below it.
Each is seen where it is seen in most of the seeds."""


def report(files: Files) -> Report:
    """Returns what each corruption does to each layer, and the verdicts."""
    runs = claims.by_setting(rows.load(files.csv(), Run))

    def points(setting: Setting) -> str:
        lost = (claims.points_lost_at_once, claims.points_lost)
        at_once, later = (claims.median(runs, setting, quantity) for quantity in lost)
        failures = [
            n for n, failure in claims.FAILURES.items() if claims.seen(runs, setting, failure)
        ]
        return " ".join((f"{at_once:z.1f} / {later:z.1f}", *failures))

    def gradient(setting: Setting) -> str:
        times = claims.median(runs, setting, claims.gradient_times)
        return f"{times:.1f}" if times < 100 else f"{times:,.0f}"

    def accuracy(setting: Setting) -> str:
        return f"{claims.median(runs, setting, claims.accuracy_after):.1%}"

    thread, found = judge(claims.THREAD, runs), judge(claims.FOUND, runs)
    measured = "measured, median over seeds"
    tables = (
        _grid(runs, "test points lost, at once / 100 steps later", points),
        LEGEND,
        _grid(runs, "largest gradient, times the clean run's", gradient),
        _grid(runs, "training accuracy, 20 steps after", accuracy, clean=True),
        verdicts_table(thread, "claim of Caffe #3963", measured),
        verdicts_table(found, "found here", measured),
    )
    return Report("\n\n".join(tables), [*thread, *found])


def _grid(
    runs: claims.Runs, title: str, cell: Callable[[Setting], str], *, clean: bool = False
) -> str:
    """Returns a table with one row per corruption, and one column per layer."""
    layers = list(dict.fromkeys(setting.layer for setting in runs))
    lines: dict[str, list[str]] = {}
    for setting in runs:
        if clean or setting.corruption != CLEAN:
            lines.setdefault(setting.corruption, []).append(cell(setting))
    return table((title, *layers), [(name, *cells) for name, cells in lines.items()])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--network",
        choices=tuple(NETWORKS),
        help="perceptron: one hidden layer, normalised; small, large: those of the stability "
        "experiment, about seven and twenty times as long (default: perceptron)",
    )
    mnist.add_argument(parser)


EXPERIMENT = Experiment(
    name="variance_clipping",
    about=__doc__,
    whole=Job(),
    quick=QUICK,
    measure=measure,
    report=report,
    draw=draw,
    quick_help="one seed, two approaches, four corruptions; exits with 1 if what is found here "
    "is not found again",
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
