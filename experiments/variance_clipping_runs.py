"""The runs of the variance clipping experiment: what is kept of each, and as files."""

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import results
from .lab.training import Record

MOMENTUM = 0.99
# Ginsburg's factor. He starts after 200 batches; here training has settled after 100. (All of
# it 100 steps later has the same verdicts.)
RATIO, START = 4.0, 100
# Soon after clipping has started. A third of a corrupted batch is left in the running average
# at the end, a hundred steps after the last: a momentum of 0.99 forgets slowly.
CORRUPTED = (110, 120, 130)
STEPS = 230
DRAWN_FROM = 90
# "Soon after" and "at the end": the mean over so many steps.
WINDOW = 20


class Setting(NamedTuple):
    approach: str
    clipped: bool
    corruption: str

    @property
    def layer(self) -> str:
        return f"{self.approach}, clipped" if self.clipped else self.approach


class Run(NamedTuple):
    """Of one seed. "From" is from the first corrupted step on, "after" after the last one."""

    loss: float  # the largest from
    gradient: float  # the largest from, of any parameter
    accuracy_after: float  # training accuracy of the clean batches soon after
    accuracy_end: float  # the same at the end
    test_after: float  # test accuracy in inference mode, right after
    test_end: float
    variance: float  # the largest running variance from, mean over channels
    growth: float  # the largest factor that it grows by in one step, from


Runs = dict[Setting, dict[int, Run]]


def summarise(record: Record) -> Run:
    first, last = CORRUPTED[0] - 1, CORRUPTED[-1]
    accuracy = record.probed["training_accuracy"]
    variance = record.probed["running_variance"]
    return Run(
        *map(
            float,
            (
                record.loss[first:].max(),
                record.gradient_norms[:, first:].max(),
                accuracy[last : last + WINDOW].mean(),
                accuracy[-WINDOW:].mean(),
                record.accuracy[last - 1],
                record.accuracy[-1],
                variance[first:].max(),
                (variance[first:] / variance[first - 1 : -1]).max(),
            ),
        )
    )


def save(path: Path, runs: Runs) -> None:
    rows = [
        (*setting, seed, *(f"{value:.6g}" for value in run))
        for setting, of_seeds in runs.items()
        for seed, run in of_seeds.items()
    ]
    results.write_csv(path, (*Setting._fields, "seed", *Run._fields), rows)


def load(path: Path) -> Runs:
    """What `save` wrote, to its six digits."""
    runs: defaultdict[Setting, dict[int, Run]] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            values = (float(row[name]) for name in Run._fields)
            runs[_setting(row)][int(row["seed"])] = Run(*values)
    return dict(runs)


# What the figures show, step by step.
QUANTITIES = ("loss", "training_accuracy", "running_variance", "test_accuracy")
Curves = dict[Setting, dict[int, np.ndarray]]  # by seed: [steps, (step, *QUANTITIES)]


def curves(record: Record) -> np.ndarray:
    columns = (
        np.arange(1, len(record.loss) + 1),
        record.loss,
        record.probed["training_accuracy"],
        record.probed["running_variance"],
        record.accuracy,
    )
    return np.stack(columns, axis=1)[DRAWN_FROM - 1 :]


def save_curves(path: Path, drawn: Curves) -> None:
    rows: Iterable[Sequence[object]] = (
        (*setting, seed, *("" if np.isnan(value) else f"{value:.4g}" for value in values))
        for setting, of_seeds in drawn.items()
        for seed, table in of_seeds.items()
        for values in table
    )
    results.write_csv(path, (*Setting._fields, "seed", "step", *QUANTITIES), rows)


def load_curves(path: Path) -> Curves:
    """What `save_curves` wrote, to its four digits."""
    read: defaultdict[Setting, defaultdict[int, list[list[float]]]]
    read = defaultdict(lambda: defaultdict(list))
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            values = [float(row[name] or "nan") for name in ("step", *QUANTITIES)]
            read[_setting(row)][int(row["seed"])].append(values)
    return {
        setting: {seed: np.array(table) for seed, table in of_seeds.items()}
        for setting, of_seeds in read.items()
    }


def _setting(row: dict[str, str]) -> Setting:
    return Setting(row["approach"], row["clipped"] == "True", row["corruption"])
