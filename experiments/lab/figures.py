"""Gives all figures one look. They are made without pyplot, which keeps state."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from .curves import Curves
from .peers import names

# Okabe and Ito's colours, told apart with any colour vision; line styles for print.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"

# One colour for each package, and one for its variants.
PEERS: dict[str, str] = {
    names.OURS: BLUE,
    names.OURS_SEPARATE: BLUE,
    names.OURS_PALLAS: SKY,
    names.EQUINOX: VERMILION,
    names.EQUINOX_EMA: PURPLE,
    names.EQUINOX_BATCH: VERMILION,
    names.LINEN: GREEN,
    names.LINEN_TWO_PASS: GREEN,
    names.NNX: SKY,
    names.NNX_TWO_PASS: SKY,
    names.TORCH: ORANGE,
    names.TORCH_COMPILED: "#B8860B",
}

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


@contextmanager
def style() -> Iterator[None]:
    """Gives what is drawn inside the look of all figures here."""
    with matplotlib.rc_context(_STYLE):
        yield


def save(figure: Figure, path: Path) -> Path:
    """Writes the figure, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version in its metadata, a figure changes only when its content does.
    figure.savefig(path, metadata={"Software": None})
    return path


def _median_and_range(axes: Axes, curves: Curves, quantity: str, **line: Any) -> None:
    """Draws the median over the seeds by step, with their range shaded; accuracy in percent."""
    values = curves[quantity] * (100 if quantity.endswith("accuracy") else 1)
    measured = ~np.isnan(values).any(axis=0)  # from every seed
    x, values = curves["step"][0, measured], values[:, measured]
    marker = "o" if len(x) < 20 else None
    axes.plot(x, np.median(values, axis=0), marker=marker, markersize=3, **line)
    low, high = values.min(axis=0), values.max(axis=0)
    axes.fill_between(x, low, high, color=line["color"], alpha=0.12, linewidth=0)


def panels(
    figure: Figure,
    axes: NDArray[Any],
    quantities: Mapping[str, str],
    columns: Mapping[str, Mapping[str, tuple[Curves, dict[str, Any]]]],
) -> Legend:
    """Draws quantities, with their labels, by step; returns the legend below the panels.

    `axes` has one row for each quantity. `columns` gives by title, and there by the label of
    each line, its curves and its style.
    """
    for row, (quantity, label) in zip(axes, quantities.items(), strict=True):
        row[0].set_ylabel(label)
        for panel, lines in zip(row, columns.values(), strict=True):
            for name, (curves, style) in lines.items():
                _median_and_range(panel, curves, quantity, label=name, **style)
    for column, title in zip(axes.T, columns, strict=True):
        column[0].set_title(title)
        column[-1].set_xlabel("training step")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    return figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def log_scale(axes: Axes, name: str, subs: tuple[int, ...] = (1, 2, 5)) -> None:
    """Makes the axis `"x"` or `"y"` logarithmic, with ticks at such multiples, in digits."""
    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
