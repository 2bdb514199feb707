"""The runs of the stability experiment: which there are, and as files."""

import csv
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import results
from .lab.training import Record

NO_NORM = "none"


class Setting(NamedTuple):
    """An approach by name, `"none"` for no normalisation, and its momentum."""

    approach: str
    momentum: float

    @property
    def label(self) -> str:
        return "no norm" if self.approach == NO_NORM else f"{self.approach} {self.momentum:g}"


# What the three figures show. Momentum means nothing where there is no normalisation.
FIGURE_1 = (
    Setting(NO_NORM, 0.0),
    Setting("ema", 0.99),
    Setting("batch", 0.99),
    Setting("ema", 0.5),
)
MOMENTA = (0.5, 0.99, 0.9999)
FIGURE_2 = tuple(
    Setting(approach, momentum)
    for momentum in MOMENTA
    for approach in ("batch", "adam", "smooth_start", "ema")
)
FIGURE_3 = tuple(
    Setting(approach, 0.99)
    for approach in ("batch", "ema", "adam", "smooth_start", "variance_clip")
)
SETTINGS = tuple(dict.fromkeys((*FIGURE_1, *FIGURE_2, *FIGURE_3)))

# Of every setting, one run per seed.
Runs = dict[Setting, dict[int, Record]]

_COLUMNS = ("loss", "largest_gradient_norm", "output_mean", "output_std", "accuracy")


def save(path: Path, runs: Runs) -> None:
    """One row per setting, seed and step. Six digits: a CSV of the same seeds is the same."""
    rows = []
    for setting, records in runs.items():
        for seed, record in records.items():
            columns = (
                record.loss,
                record.gradient_norms.max(axis=0),
                record.output_mean,
                record.output_std,
                record.accuracy,
            )
            for step, values in enumerate(zip(*columns, strict=True), start=1):
                cells = ("" if np.isnan(value) else f"{value:.6g}" for value in values)
                rows.append((setting.approach, f"{setting.momentum:g}", seed, step, *cells))
    results.write_csv(path, ("approach", "momentum", "seed", "step", *_COLUMNS), rows)


def load(path: Path) -> Runs:
    """What `save` wrote; of the gradients only the largest norm is left."""
    rows: defaultdict[tuple[Setting, int], list[list[float]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            run = Setting(row["approach"], float(row["momentum"])), int(row["seed"])
            rows[run].append([float(row[column] or "nan") for column in _COLUMNS])
    runs: Runs = defaultdict(dict)
    for (setting, seed), values in rows.items():
        loss, norm, mean, std, accuracy = np.array(values).T
        runs[setting][seed] = Record(loss, norm[None], mean, std, accuracy)
    return dict(runs)
