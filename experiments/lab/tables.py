"""Makes aligned tables in Markdown, for the terminal and for documents alike."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def table(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table whose columns are aligned."""
    cells = [list(map(str, line)) for line in (header, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    padded = [map(str.ljust, line, widths) for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def listing(rows: Iterable[Any], columns: Mapping[str, str]) -> str:
    """Returns a table with one line for each row, a `NamedTuple`.

    `columns` says by header how fields are written: `{"time": "{median:.3f} ms"}`.
    """
    forms = columns.values()
    return table([*columns], [[f.format_map(row._asdict()) for f in forms] for row in rows])


def grid(
    title: str,
    lines: Mapping[str, Any] | Sequence[str],
    columns: Mapping[str, Any] | Sequence[str],
    cell: Callable[[Any, Any], str],
) -> str:
    """Returns a table of `cell(line, column)`, with one line and one column for each of these.

    A mapping gives by its label what `cell` is called with; otherwise that is the label.
    """
    down, across = (
        axis if isinstance(axis, Mapping) else dict(zip(axis, axis, strict=True))
        for axis in (lines, columns)
    )
    return table(
        (title, *across),
        [(label, *(cell(line, c) for c in across.values())) for label, line in down.items()],
    )
