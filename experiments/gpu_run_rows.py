"""What is measured on a GPU, as rows and as files."""

import csv
import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from . import results
from .accuracy_claims import Verdict
from .gpu_run_timing import Times

# The parts of the job, in this order: first what a run that is cut short has to show.
BITS, ACCURACY, AGREEMENT, TRAIN = "bits", "accuracy", "agreement", "train"
LAYER_NORM, LAYERS = "layer_norm", "layers"
PARTS = (BITS, ACCURACY, AGREEMENT, TRAIN, LAYER_NORM, LAYERS)
COPY = "copy"  # measured with each of them, as the others' unit

FAILED, NOT_SERVED = "failed: ", "not served: "


@dataclasses.dataclass(frozen=True)
class Row:
    """Times are of one call of one layer, or of one step. What was not measured is NaN."""

    part: str
    what: str  # the shape of x, a case of the accuracy suite, a network
    layout: str
    dtype: str
    program: str  # "forward", "forward + backward"; of the accuracy, what was compared
    contender: str
    bytes: int = 0  # of x
    median: float = math.nan  # milliseconds, over the rounds
    low: float = math.nan  # the quartiles
    high: float = math.nan
    host: float = math.nan  # of which the host was busy
    share: float = math.nan  # of the bandwidth of a copy, had it moved the least that it can
    instances: int = 0  # of the layer in one program, each with arrays of its own
    calls: int = 0  # of the program in one timing
    value: float = math.nan  # GB/s, of the least; and what is no time: an error, a number
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.note.startswith(FAILED)

    @property
    def of_host(self) -> bool:
        """Whether it was the host's time that was measured: the device waited for calls."""
        return self.host > 0.9 * self.median


FIELDS = dataclasses.fields(Row)


def because(row: Row, error: Exception) -> Row:
    """What is in the row's place where something raised.

    Asked for by name, a kernel may say that it cannot serve: that is an answer. "auto" and
    "xla" serve everything.
    """
    said = str(error).strip().partition("\n")[0][:300]
    by_name = said.startswith("implementation=") and not row.contender.endswith(("auto", "xla"))
    if isinstance(error, ValueError) and by_name:
        return dataclasses.replace(row, note=NOT_SERVED + said)
    return dataclasses.replace(row, note=f"{FAILED}{type(error).__name__}: {said}")


def timed(row: Row, times: Times | Exception, least: float, bandwidth: float) -> Row:
    """`least` bytes are what has to move; `bandwidth` is a copy's, in GB/s."""
    if isinstance(times, Exception):
        return because(row, times)
    low, median, high = map(float, np.percentile(1e3 * times.seconds, (25, 50, 75)))
    speed = least / median / 1e6
    return dataclasses.replace(
        row,
        median=median,
        low=low,
        high=high,
        host=float(np.median(1e3 * times.host)),
        share=speed / bandwidth,
        value=speed,
        instances=times.instances,
        calls=times.calls,
    )


def replaced(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """What was measured anew, by part and dtype, and of the others the old rows."""
    new = list(new)
    parts = {row.part for row in new}
    anew = {(row.part, row.dtype) for row in new} | {(part, "") for part in parts}
    return [*(row for row in old if (row.part, row.dtype) not in anew), *new]


def load(path: Path) -> list[Row]:
    """What was saved, to its five digits."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(**{f.name: _value(row[f.name], f.type) for f in FIELDS})
            for row in csv.DictReader(file)
        ]


def _text(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.5g}"
    return value


def _value(text: str, kind: Any) -> Any:
    return float(text or "nan") if kind is float else kind(text)


class Files:
    """A CSV of rows, and a JSON with what they were measured with, named after the device."""

    def __init__(self, out: Path, stem: str, about: dict[str, Any]):
        """`about` tells what rows may stand side by side: the job and the environment."""
        self.csv = out / "results" / f"{stem}.csv"
        self._json, self._about = self.csv.with_suffix(".json"), about
        self._seconds: dict[str, float] = {}

    def earlier(self) -> list[Row]:
        """What was measured before of the same job in the same environment."""
        if not (self.csv.exists() and self._json.exists()):
            return []
        written = json.loads(self._json.read_text(encoding="utf-8"))
        if {name: written.get(name) for name in self._about} != self._about:
            print(f"{self.csv} was measured with something else, and will be replaced.")
            return []
        self._seconds = written["seconds"]
        return load(self.csv)

    def save(self, rows: Iterable[Row]) -> None:
        cells = [[_text(getattr(row, field.name)) for field in FIELDS] for row in rows]
        results.write_csv(self.csv, [field.name for field in FIELDS], cells)

    def describe(
        self,
        left_out: dict[str, str],
        seconds: dict[str, float],
        claims: Iterable[Verdict] = (),
    ) -> None:
        results.write_json(
            self._json,
            {
                **self._about,
                "left out": left_out,
                "seconds": self._seconds | seconds,
                "claims": [verdict._asdict() for verdict in claims],
            },
        )
