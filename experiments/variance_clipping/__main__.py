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
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from eqx_norm import BatchNorm
from eqx_norm.strategies import VarianceClip, named
from experiments.lab import curves, mnist, rows, training
from experiments.lab.claims import judge, verdicts_table
from experiments.lab.experiment import Experiment, Files, Report
from experiments.lab.networks import NETWORKS, MakeNorm
from experiments.lab.tables import grid

from . import claims
from .corruptions import CLEAN, CONTRAST, CORRUPTIONS, LOUD, ONE_IMAGE, SCALED, corrupted
from .figures import draw, is_drawn
from .runs import CORRUPTED, MOMENTUM, RATIO, START, STEPS, Run, Setting, Step, summary


@dataclass(frozen=True)
class Job(training.Job):
    """Says what to run: by default the whole job."""

    approaches: tuple[str, ...] = ("batch", "ema", "smooth_start")
    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    network: str = "perceptron"

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

    def change(setting: Setting, step: int, images: training.Images) -> training.Images:
        return corrupted(images, setting.corruption) if step in CORRUPTED else images

    runs: list[Run] = []
    drawn: list[Step] = []
    for setting, seed, record in training.runs(
        job, job.settings, make_norm, STEPS, EVALUATED, change, probe
    ):
        runs.append(summary(setting, seed, record.curves))
        if is_drawn(setting):
            steps = curves.steps(Step, setting, seed, record.curves)
            drawn += [step for step in steps if step.step >= DRAWN_FROM]
    rows.save(files.csv(), Run, runs)
    rows.save(files.csv("_curves"), Step, drawn, digits=4)
    return {
        **job.noted(),
        "steps": STEPS,
        "corrupted steps": CORRUPTED,
        "momentum": MOMENTUM,
        "clipping": {"ratio": RATIO, "start": START},
    }


def report(files: Files) -> Report:
    """Returns what each corruption does to each layer, and the verdicts."""
    runs = claims.by_setting(rows.load(files.csv(), Run))
    layers = {setting.layer: setting for setting in runs}
    corruptions = list(dict.fromkeys(setting.corruption for setting in runs))

    def median(layer: Setting, corruption: str, quantity: claims.Quantity) -> float:
        return claims.median(runs, layer._replace(corruption=corruption), quantity)

    def points(corruption: str, layer: Setting) -> str:
        lost = (claims.points_lost_at_once, claims.points_lost)
        at_once, later = (median(layer, corruption, quantity) for quantity in lost)
        setting = layer._replace(corruption=corruption)
        failures = [
            n for n, failure in claims.FAILURES.items() if claims.seen(runs, setting, failure)
        ]
        return " ".join((f"{at_once:z.1f} / {later:z.1f}", *failures))

    def gradient(corruption: str, layer: Setting) -> str:
        times = median(layer, corruption, claims.gradient_times)
        return f"{times:.1f}" if times < 100 else f"{times:,.0f}"

    def accuracy(corruption: str, layer: Setting) -> str:
        return f"{median(layer, corruption, claims.accuracy_after):.1%}"

    thread, found = judge(claims.THREAD, runs), judge(claims.FOUND, runs)
    measured = "measured, median over seeds"
    bad = [corruption for corruption in corruptions if corruption != CLEAN]
    tables = (
        grid("test points lost, at once / 100 steps later", bad, layers, points),
        claims.LEGEND,
        grid("largest gradient, times the clean run's", bad, layers, gradient),
        grid("training accuracy, 20 steps after", corruptions, layers, accuracy),
        verdicts_table(thread, "claim of Caffe #3963", measured),
        verdicts_table(found, "found here", measured),
    )
    one_image = [median(s, ONE_IMAGE, claims.points_lost) for s in claims.both(ONE_IMAGE)]
    not_clipped, clipped = (f"{points:.1f} points lost" for points in one_image)
    return Report(
        "\n\n".join(tables),
        [*thread, *found],
        ours=f"clipped, one corrupted image a batch: {clipped}",
        peers=f"not clipped: {not_clipped}",
    )


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
    thread="[Caffe #3963](https://github.com/BVLC/caffe/issues/3963)",
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
