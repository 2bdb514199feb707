"""Writes rows of results to CSV, and reads them by the types of their fields.

A kind of row is a `NamedTuple` or a dataclass whose fields are `str`, `int`, `float`, `bool`,
`tuple[int, ...]` (written as 64x3x3), or one of these or `None`:

    rows.save(path, Row, measured)
    measured = rows.load(path, Row)

An empty cell is NaN where a float is expected, and `None` where that may be.
"""

import csv
import math
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")
Key = TypeVar("Key")


def save(path: Path, kind: type[Row], rows: Iterable[Row], digits: int = 6) -> None:
    """Writes the rows, one line each, floats to so many significant digits.

    Fixed digits make files of the same numbers the same files.
    """
    names = list(typing.get_type_hints(kind))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_text(getattr(row, name), digits) for name in names] for row in rows)


def load(path: Path, kind: type[Row]) -> list[Row]:
    """Returns what `save` wrote, to its digits."""
    hints = typing.get_type_hints(kind)
    with path.open(newline="", encoding="utf-8") as file:
        return [
            kind(**{name: _value(row[name], hint) for name, hint in hints.items()})
            for row in csv.DictReader(file)
        ]


def by(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Returns the rows of each key together, in the order in which they come."""
    found: defaultdict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return dict(found)


def _text(value: Any, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, float):  # NumPy's float64 is one, too
        return "" if math.isnan(value) else f"{value:.{digits}g}"
    return str(value)


def _value(text: str, hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        if not text:
            return None
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
    if hint is float:
        return float(text or math.nan)
    if hint is bool:
        return {"True": True, "False": False}[text]
    if hint in (int, str):
        return hint(text)
    return tuple(int(size) for size in text.split("x") if size)
