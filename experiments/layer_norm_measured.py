"""What the layer norm experiment measured: as rows, and as files."""

import csv
import typing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import (
    layer_norm_by_batch_norm,
    layer_norm_gradients,
    layer_norm_pair,
    layer_norm_speed,
    results,
)


class Measured(NamedTuple):
    pair: list[layer_norm_pair.Row]
    gradients: list[layer_norm_gradients.Row]
    by_batch_norm: list[layer_norm_by_batch_norm.Row]
    speed: list[layer_norm_speed.Row]


ROWS = {name: typing.get_args(hint)[0] for name, hint in Measured.__annotations__.items()}


def save(folder: Path, measured: Measured, means: dict[str, NDArray]) -> None:
    """One file for each part, and one for the pairs at other means: by layer, `(2, means)`."""
    for name, rows in measured._asdict().items():
        cells = [tuple(map(_text, row)) for row in rows]
        results.write_csv(folder / f"layer_norm_{name}.csv", ROWS[name]._fields, cells)
    results.write_csv(
        folder / "layer_norm_means.csv",
        ("layer", "mean", "error of y", "dx"),
        [
            (layer, *map(_text, (mean, *errors)))
            for layer, found in means.items()
            for mean, *errors in zip(layer_norm_pair.MEANS, *found, strict=True)
        ],
    )


def load(folder: Path) -> Measured:
    """What `save` wrote, to its nine digits."""
    return Measured(*(_load(folder / f"layer_norm_{name}.csv", ROWS[name]) for name in ROWS))


def _load(path: Path, row_type: Any) -> list[Any]:
    hints = typing.get_type_hints(row_type)
    with path.open(newline="", encoding="utf-8") as file:
        return [
            row_type(**{name: _value(text, hints[name]) for name, text in row.items()})
            for row in csv.DictReader(file)
        ]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return "" if np.isnan(value) else f"{value:.9g}"


def _value(text: str, hint: Any) -> Any:
    if hint is str:
        return text
    if hint is float:
        return float(text or "nan")
    return tuple(map(int, text.split("x")))
