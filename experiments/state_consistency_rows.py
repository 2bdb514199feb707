"""One row of the matrix: what was run, and what came of it; and the rows as a file."""

import csv
import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from . import results

FINITE = "finite"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What was run."""

    layer: str
    implementation: str  # empty where the layer has no choice
    dtype: str
    shape: tuple[int, ...]  # batch, channels, *spatial
    way: str
    backward: bool
    batch: str = FINITE  # or which number that is not finite the second batch holds

    @property
    def n(self) -> int:
        """How many values a channel has."""
        return math.prod(self.shape) // self.shape[1]


@dataclasses.dataclass(frozen=True)
class Found:
    """What came of it. NaN: it cannot be told here, or has no meaning."""

    raised: str = ""  # by the training call
    while_tracing: bool = False  # whether it raises as soon as shapes are known
    evaluation_changed: bool = False  # whether an evaluation changed the memory
    difference: float = math.nan  # largest, of the evaluations before and after one update
    # How many updates of the running average a training call made: the first, the second.
    updates_1: float = math.nan
    updates_2: float = math.nan
    # Relative errors of what was taken into the average, the larger of two updates.
    mean_error: float = math.nan
    biased_error: float = math.nan
    unbiased_error: float = math.nan
    # Means, variances, and what else is remembered: at first, after each training call.
    memory_0: str = ""
    memory_1: str = ""
    memory_2: str = ""
    # How many numbers are NaN or infinite: in outputs, gradients and memory while training
    # on finite batches; in the evaluations after each training call; in the last evaluation
    # and the memory, some batches after one that was not finite.
    nonfinite_training: int = 0
    nonfinite_evaluation: int = 0
    nonfinite_later: int = 0
    rejected: float = math.nan  # how many batches the layer says it has rejected


Row = tuple[Setting, Found]


def said(memory: Iterable[np.ndarray]) -> str:
    """As text: from the shortest digits that tell float32 numbers apart, bits can be had."""
    return " | ".join(" ".join(map(str, np.ravel(array))) for array in memory)


def means_and_variances(memory: str) -> np.ndarray:
    """Those numbers of what `said` wrote, in one array."""
    return np.array(" ".join(memory.split(" | ")[:2]).split(), np.float32)


def save(path: Path, rows: Iterable[Row]) -> None:
    fields = [*dataclasses.fields(Setting), *dataclasses.fields(Found)]
    results.write_csv(
        path,
        [field.name for field in fields],
        ([_cell(value) for part in row for value in vars(part).values()] for row in rows),
    )


def load(path: Path) -> list[Row]:
    """What `save` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return [(_read(Setting, row), _read(Found, row)) for row in csv.DictReader(file)]


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.9g}"
    return str(value)


def _read(kind: Any, row: dict[str, str]) -> Any:
    return kind(**{f.name: _PARSERS[f.type](row[f.name]) for f in dataclasses.fields(kind)})


_PARSERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    bool: lambda text: text == "True",
    int: int,
    float: lambda text: float(text or math.nan),
    tuple[int, ...]: lambda text: tuple(map(int, text.split("x"))),
}
