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

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
from jaxtyping import Array

from eqx_norm import BatchNorm
from eqx_norm.strategies import VarianceClip, named
from experiments.lab import curves, mnist, rows, training
from experiments.lab.claims import judge, verdicts_table
from experiments.lab.experiment import Experiment, Files, Report
from experiments.lab.networks import MakeNorm
from experiments.lab.tables import grid

from . import claims, runs
from .claims import Cell
from .figures import DRAWN, draw
from .runs import CLEAN, CORRUPTED, STEPS, Run, Setting, Step


@dataclass(frozen=True)
class Job(training.Job):
    """Says what to run: by default the whole job."""

    approaches: tuple[str, ...] = ("batch", "ema", "smooth_start")
    corruptions: tuple[str, ...] = tuple(runs.CORRUPTIONS)
    network: str = "perceptron"

    @property
    def settings(self) -> list[Setting]:
        pairs = itertools.product(self.approaches, (False, True), self.corruptions)
        return [Setting(*one) for one in pairs]


# What is claimed to be found here, for one seed.
QUICK = Job(
    approaches=("batch", "ema"),
    corruptions=(CLEAN, runs.SCALED, runs.CONTRAST, runs.ONE_IMAGE, runs.LOUD),
    seeds=(0,),
)
DRAWN_FROM = 90
# Right before and after the corrupted batches, and in between.
EVALUATED = {*range(DRAWN_FROM, STEPS, 10), *(step - 1 for step in CORRUPTED)}


def make_norm(setting: Setting) -> MakeNorm:
    strategy = named(setting.approach, runs.MOMENTUM)
    if setting.clipped:
        strategy = VarianceClip(strategy, ratio=runs.RATIO, start=runs.START)
    return lambda channels: BatchNorm(channels, training.AXIS, approach=strategy)


def probe(model: Any, state: eqx.nn.State, output: Array, labels: Array) -> dict[str, Array]:
    """Returns training accuracy and running variance."""
    running = model.norm.approach.infer(state.get(model.norm.memory_index))
    return {
        "training_accuracy": (output.argmax(axis=1) == labels).mean(),
        "running_variance": running.variance.mean(),
    }


def measure(job: Job, files: Files) -> dict[str, Any]:
    """Trains every setting from every seed."""

    def change(setting: Setting, step: int, images: training.Images) -> training.Images:
        return runs.corrupted(images, setting.corruption) if step in CORRUPTED else images

    kept: list[Run] = []
    drawn: list[Step] = []
    for setting, seed, record in training.runs(
        job, job.settings, make_norm, STEPS, EVALUATED, change, probe
    ):
        kept.append(runs.summary(setting, seed, record.curves))
        if setting.corruption in DRAWN or setting[1:] == (False, CLEAN):
            steps = curves.steps(Step, setting, seed, record.curves)
            drawn += [step for step in steps if step.step >= DRAWN_FROM]
    rows.save(files.csv(), Run, kept)
    rows.save(files.csv("_curves"), Step, drawn, digits=4)
    return {
        **job.noted(),
        "steps": STEPS,
        "corrupted steps": CORRUPTED,
        "momentum": runs.MOMENTUM,
        "clipping": {"ratio": runs.RATIO, "start": runs.START},
    }


def report(files: Files) -> Report:
    """Returns what each corruption does to each layer, and the verdicts."""
    cells = claims.by_setting(rows.load(files.csv(), Run))
    layers = {f"{s.approach}, clipped" if s.clipped else s.approach: s for s in cells}
    corruptions = list(dict.fromkeys(setting.corruption for setting in cells))
    bad = [corruption for corruption in corruptions if corruption != CLEAN]

    def table(title: str, lines: list[str], text: Callable[[Cell], str]) -> str:
        def cell(corruption: str, layer: Setting) -> str:
            return text(cells[layer._replace(corruption=corruption)])

        return grid(title, lines, layers, cell)

    def points(cell: Cell) -> str:
        lost = f"{cell.points_lost_at_once:z.1f} / {cell.points_lost:z.1f}"
        return " ".join([lost, *(name for name in cell.failures if name != "ruined")])

    def gradient(cell: Cell) -> str:
        times = cell.gradient_times
        return f"{times:.1f}" if times < 100 else f"{times:,.0f}"

    thread, found = judge(claims.THREAD, cells), judge(claims.FOUND, cells)
    measured = "measured, median over seeds"
    tables = (
        table("test points lost, at once / 100 steps later", bad, points),
        claims.LEGEND,
        table("largest gradient, times the clean run's", bad, gradient),
        table(
            "training accuracy, 20 steps after", corruptions, "{0.accuracy_after:.1%}".format
        ),
        verdicts_table(thread, "claim of Caffe #3963", measured),
        verdicts_table(found, "found here", measured),
    )
    plain, clipped = claims.of_batch(cells, runs.ONE_IMAGE)
    return Report(
        "\n\n".join(tables),
        [*thread, *found],
        ours=f"clipped, one corrupted image a batch: {clipped.points_lost:.1f} points lost",
        peers=f"not clipped: {plain.points_lost:.1f} points lost",
    )


EXPERIMENT = Experiment(
    name="variance_clipping",
    about=__doc__,
    whole=Job(),
    quick=QUICK,
    measure=measure,
    report=report,
    draw=draw,
    thread="[Caffe #3963](https://github.com/BVLC/caffe/issues/3963)",
    add_arguments=mnist.add_argument,
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
