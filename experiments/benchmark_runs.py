"""What the benchmark measured, as rows and as a file."""

import csv
import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import results

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """A contestant on an array. Not every quantity is measured of every row: those are NaN."""

    # "layer", "stack" (of 50, to compile) or "growth" (of one shape, in N).
    part: str
    shape: Shape  # [N, C, *spatial]
    dtype: str
    contestant: str
    program: str  # "forward" or "forward + backward"
    # Of one call: median, and 10th and 90th percentile over the rounds; in milliseconds.
    median: float = math.nan
    low: float = math.nan
    high: float = math.nan
    calls: int = 0  # in one timing
    temporaries: float = math.nan  # bytes that the program needs beside its results, over x's
    compile_seconds: float = math.nan
    deviation: float = math.nan  # from the same in float64: see benchmark_agreement

    @property
    def bytes(self) -> int:
        """Of x."""
        return math.prod(self.shape) * {"f32": 4, "bf16": 2}[self.dtype]


Runs = list[Row]
FLOATS = tuple(f.name for f in dataclasses.fields(Row) if f.default is math.nan)


def merge(*several: Iterable[Row]) -> Runs:
    """One row of the rows that are of the same program, with what was measured in each."""
    merged: dict[tuple[object, ...], Row] = {}
    for row in (row for rows in several for row in rows):
        key = (row.part, row.shape, row.dtype, row.contestant, row.program)
        measured = {name: getattr(row, name) for name in FLOATS}
        measured = {name: value for name, value in measured.items() if not math.isnan(value)}
        merged[key] = dataclasses.replace(merged.get(key, row), **measured)
    return list(merged.values())


def summary(seconds: NDArray[np.float64]) -> dict[str, float]:
    low, median, high = np.percentile(1e3 * seconds, (10, 50, 90))
    return {"median": float(median), "low": float(low), "high": float(high)}


def named(shape: Shape) -> str:
    return "x".join(map(str, shape))


def shape_of(text: str) -> Shape:
    return tuple(int(size) for size in text.replace("x", ",").split(","))


def save(path: Path, runs: Iterable[Row]) -> None:
    header = [field.name for field in dataclasses.fields(Row)]
    rows = []
    for row in runs:
        cells = []
        for name in header:
            value = getattr(row, name)
            if isinstance(value, float):
                value = "" if math.isnan(value) else f"{value:.5g}"
            cells.append(named(value) if isinstance(value, tuple) else value)
        rows.append(cells)
    results.write_csv(path, header, rows)


def load(path: Path) -> Runs:
    """What `save` wrote, to its five digits."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(
                part=row["part"],
                shape=shape_of(row["shape"]),
                dtype=row["dtype"],
                contestant=row["contestant"],
                program=row["program"],
                calls=int(row["calls"]),
                **{name: float(row[name] or "nan") for name in FLOATS},
            )
            for row in csv.DictReader(file)
        ]
