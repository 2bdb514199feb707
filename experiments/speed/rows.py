"""Defines the rows that are measured, and picks some of them."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from experiments.lab.peers import names

from .cases import Problem, Shape, shape_name

FAILED, NOT_SERVED, DIFFERS = "failed: ", "not served: ", "differs"


@dataclass(frozen=True)
class Row:
    """Says what was measured of a peer on an array; what was not is NaN.

    Times are of one call of one layer, or of one step.
    """

    device: str
    part: str
    shape: Shape = ()
    dtype: str = ""
    layout: str = ""
    peer: str = ""
    program: str = ""
    cache: str = ""  # HOT or COLD, where it can be either
    median: float = math.nan  # milliseconds, over the rounds
    low: float = math.nan  # percentiles: 10 and 90 on a CPU, the quartiles on a GPU
    high: float = math.nan
    host: float = math.nan  # of which the host was busy
    share: float = math.nan  # of the bandwidth of a copy, had it moved the least that it can
    calls: int = 0  # of the program in one timing; or runs whose bits were compared
    instances: int = 0  # of the layer in one program, each with arrays of its own
    temporaries: float = math.nan  # bytes that the program needs beside its results, over x's
    units: float = math.nan  # bytes that a block moves, over those of its x
    trace_seconds: float = math.nan  # of the processor
    lower_seconds: float = math.nan
    compile_seconds: float = math.nan  # those two included
    deviation: float = math.nan  # from the same in float64
    differing: float = math.nan  # runs that gave other bits than the first
    note: str = ""

    @property
    def problem(self) -> Problem:
        return Problem(self.shape, self.dtype, self.layout)

    @property
    def bytes(self) -> int:
        """Returns the bytes of x."""
        return self.problem.bytes

    @property
    def place(self) -> str:
        """Returns the array and the program in words."""
        words = (shape_name(self.shape), self.layout, self.dtype, self.program, self.cache)
        return " ".join(filter(None, words))

    @property
    def where(self) -> str:
        """Returns the place, or of it what claims do not name."""
        named = self.device == "cpu" and self.part != "layer_norm"
        return f"{shape_name(self.shape)} {self.cache}".strip() if named else self.place

    @property
    def failed(self) -> bool:
        return self.note.startswith(FAILED)

    @property
    def of_host(self) -> bool:
        """Returns whether the device waited for calls, and the host's time was measured."""
        return self.host > 0.9 * self.median


def chosen(rows: Iterable[Row], **fields: Any) -> list[Row]:
    """Returns the rows that have these values."""
    return [r for r in rows if all(getattr(r, name) == v for name, v in fields.items())]


def measured(rows: Iterable[Row], quantity: str, **fields: Any) -> list[Row]:
    """Returns of the rows that have these values those of which the quantity was measured."""
    return [r for r in chosen(rows, **fields) if not math.isnan(getattr(r, quantity))]


def by_shape(rows: Iterable[Row]) -> dict[Shape, dict[str, Row]]:
    """Returns the row of each peer, for each shape."""
    found: dict[Shape, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.shape, {})[row.peer] = row
    return found


def because(row: Row, error: Exception) -> Row:
    """Returns what is in the row's place where something raised.

    Asked for by name, a kernel may say that it cannot serve: that is an answer.
    """
    said = str(error).strip().partition("\n")[0][:300]
    refused = isinstance(error, ValueError) and said.startswith("implementation=")
    if refused and row.peer == names.OURS_PALLAS:
        return dataclasses.replace(row, note=NOT_SERVED + said)
    return dataclasses.replace(row, note=f"{FAILED}{type(error).__name__}: {said}")
