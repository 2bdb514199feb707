"""Writes tables, and draws figures in one style, for every experiment."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray


def table(header: Sequence[Any], lines: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table with aligned columns, for the terminal and for documents."""
    cells = [[text(cell) for cell in line] for line in (header, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    padded = [map(str.ljust, line, widths) for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def text(value: Any, digits: int = 4) -> str:
    """Returns a cell's text: nothing for NaN and `None`, 64x3x3 for a shape."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float | np.floating):
        return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


# Okabe and Ito's colours, distinguishable with any colour vision; line styles for print.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"

_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "figure.constrained_layout.use": True,
}


def figure(width: float, height: float) -> Figure:
    """Returns an empty figure in the common style; width and height are in inches."""
    rcParams.update(_STYLE)  # read when axes are made, too
    return Figure(figsize=(width, height))


def plot_seeds(axes: Axes, values: NDArray[np.floating], **line: Any) -> None:
    """Draws curves [seeds, steps]: the median by step, and the range shaded."""
    measured = ~np.isnan(values).any(axis=0)  # from every seed
    steps, values = np.flatnonzero(measured) + 1, values[:, measured]
    marker = "o" if len(steps) < 20 else None
    axes.plot(steps, np.median(values, axis=0), marker=marker, markersize=3, **line)
    low, high = values.min(axis=0), values.max(axis=0)
    axes.fill_between(steps, low, high, color=line["color"], alpha=0.12, linewidth=0)


def log_scale(axes: Axes, name: str, subs: tuple[int, ...] = (1, 2, 5)) -> None:
    """Makes the axis "x" or "y" logarithmic, with ticks at multiples of powers of ten."""
    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_below(drawn: Figure, **about: Any) -> None:
    """Draws one legend below all panels, with each label once."""
    last_first = drawn.axes[::-1]  # so that the first panel's line is shown
    lines = {str(line.get_label()): line for axes in last_first for line in axes.get_lines()}
    named = {label: line for label, line in lines.items() if not label.startswith("_")}
    drawn.legend(named.values(), named, loc="outside lower center", ncols=len(named), **about)
