"""Draws the figure: times over this layer's on a CPU, shares of a copy's bandwidth on a GPU."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.lab import rows as csv
from experiments.lab.experiment import Files
from experiments.lab.figures import BLACK, log_scale, save
from experiments.lab.figures import PEERS as COLOURS
from experiments.lab.peers import names

from .cases import BOTH, LAST, MIB, ROWS, Shape, shape_name
from .claims import BY_THREE, BY_TWO, GROWS_FROM, SHARE, Rows, growing, growth
from .roofline import PARTS
from .rows import Row, by_shape, chosen, measured

# In this order from left to right; shapes for print and for any colour vision.
MARKERS: dict[str, dict[str, Any]] = {
    names.OURS: {"marker": "o", "markersize": 6.5},
    names.OURS_INVARIANT: {"marker": "o", "markerfacecolor": "white"},
    names.TORCH: {"marker": "s"},
    names.LINEN: {"marker": "^"},
    names.NNX: {"marker": "v"},
    names.EQUINOX_BATCH: {"marker": "D"},
    names.EQUINOX_EMA: {"marker": "X"},
}
# What is drawn of a row that took so long.
Value = Callable[[Row, float], float]


def draw(files: Files) -> list[Path]:
    """Draws what was timed of this layer; nothing, where nothing was."""
    rows = measured(csv.load(files.csv(), Row), "median")
    if measured(rows, "share"):
        figure = _on_a_gpu(rows)
    elif any(row.part in ("time", "growth") and row.peer == names.OURS for row in rows):
        figure = _on_a_cpu(rows)
    else:
        return []
    return [save(figure, files.figure())]


def _on_a_cpu(rows: Rows) -> Figure:
    timed = chosen(rows, part="time", peer=names.OURS)
    dtypes = list(dict.fromkeys(row.dtype for row in timed))
    panels = [*dtypes, *(["growth"] if chosen(rows, part="growth") else [])]
    # The first in full width, the others side by side, the last of them narrower.
    first, *rest = panels
    layout: Any = [[panel] * 5 for panel in panels]
    if len(rest) == 2:
        layout = [[first] * 5, [rest[0]] * 3 + [rest[1]] * 2]
    figure = Figure(figsize=(9.5, 3.6 * len(layout)))
    axes = figure.subplot_mosaic(layout)
    for dtype in dtypes:
        _over_ours(axes[dtype], rows, dtype)
    if "growth" in panels:
        _growth(axes["growth"], rows)
    _legend(figure, [axes[dtype] for dtype in dtypes])
    return figure


def _on_a_gpu(rows: Rows) -> Figure:
    panels = [
        (part, layout, dtype)
        for part, layout in (("time", LAST), ("layer_norm", ROWS))
        for dtype in dict.fromkeys(row.dtype for row in chosen(rows, part=part))
    ]
    figure = Figure(figsize=(11, 3.2 * len(panels)))
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for panel, place in zip(panels, axes, strict=True):
        _shares(place, rows, *panel)
    _legend(figure, list(axes))
    return figure


def _over_ours(axes: Axes, rows: Rows, dtype: str) -> None:
    """Draws time of forward + backward over this layer's: median, and 10 to 90% of rounds."""
    found = by_shape(chosen(rows, part="time", dtype=dtype, program=BOTH))
    found = {shape: peers for shape, peers in found.items() if names.OURS in peers}
    ours = {shape: peers[names.OURS] for shape, peers in found.items()}
    shapes = _side_by_side(
        axes, found, MARKERS, lambda row, time: time / ours[row.shape].median, _points
    )
    for place, shape in enumerate(shapes):
        if place % 2:
            axes.axvspan(place - 0.5, place + 0.5, color="0.95", lw=0, zorder=0)
        parts = found[shape].get(PARTS)
        # With a small array the time of five calls is that of calling.
        if parts is not None and parts.bytes >= MIB:
            least = parts.median / ours[shape].median
            label = PARTS if place == 0 else ""
            axes.hlines(least, place - 0.42, place + 0.42, color=BLACK, lw=1.2, label=label)
    ticks = [_in_words(shape, ours[shape].bytes) for shape in shapes]
    axes.set_xticks(range(len(shapes)), ticks, fontsize=7.5)
    axes.tick_params(axis="x", length=0)
    axes.axhline(1, color=COLOURS[names.OURS], lw=0.8, zorder=1)
    axes.set_xlim(-0.5, len(shapes) - 0.5)
    log_scale(axes, "y")
    axes.set_ylabel("time / time of this layer")
    axes.set_title(f"forward + backward, {dtype}")


def _shares(axes: Axes, rows: Rows, part: str, layout: str, dtype: str) -> None:
    """Draws shares of a copy's bandwidth, of forward + backward."""
    found = by_shape(chosen(rows, part=part, layout=layout, dtype=dtype, program=BOTH))
    shapes = _side_by_side(
        axes, found, COLOURS, lambda row, time: row.share * row.median / time, _bars
    )
    axes.axhline(1, color=BLACK, lw=0.8)
    axes.axhline(SHARE, color=BLACK, lw=0.8, ls=":")
    ticks = [shape_name(shape) for shape in shapes]
    axes.set_xticks(range(len(shapes)), ticks, rotation=30, ha="right", fontsize=7)
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.set_ylabel("share of copy bandwidth")
    what = "batch norm + ReLU, channels last" if part == "time" else "layer norm"
    axes.set_title(f"{what}, forward + backward, {dtype}")


def _growth(axes: Axes, rows: Rows) -> None:
    """Draws time over size, and the lines through the larger ones."""
    for name, marker, line in ((BY_TWO, "o", "-"), (BY_THREE, "^", "--")):
        mine = growing(rows)[name]
        values = np.array([math.prod(row.shape) for row in mine])
        look = {"marker": marker, "markersize": 4.5}
        _points(axes, names.OURS, values, *_spread(mine, lambda _, time: time), **look)
        fitted = values[values > GROWS_FROM]
        if len(fitted) > 1:
            exponent, factor = growth(mine)
            label = f"time $\\propto$ N$^{{{exponent:.2f}}}$, {name}"
            axes.plot(fitted, factor * fitted**exponent, line, color=BLACK, lw=1, label=label)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper left")
    axes.set_xscale("log", base=2)
    log_scale(axes, "y", (1,))
    axes.set_xlabel("values in x ([N, 64, 16, 16])")
    axes.set_ylabel("ms")
    axes.set_title("growth, forward + backward, f32")


def _side_by_side(
    axes: Axes,
    found: dict[Shape, dict[str, Row]],
    peers: Iterable[str],
    value: Value,
    mark: Callable[..., None],
) -> list[Shape]:
    """Draws the peers side by side on each array; returns the arrays, the largest first."""
    shapes = sorted(found, key=math.prod, reverse=True)
    present = [name for name in peers if any(name in rows for rows in found.values())]
    width = 0.84 / max(1, len(present))
    for i, name in enumerate(present):
        at = [place for place, shape in enumerate(shapes) if name in found[shape]]
        middle = np.array(at) + (i - (len(present) - 1) / 2) * width
        spread = _spread([found[shapes[place]][name] for place in at], value)
        label = f"{name} (this)" if name == names.OURS else name
        mark(axes, name, middle, *spread, label=label, width=width)
    axes.grid(visible=False, axis="x")
    return shapes


def _spread(rows: Rows, value: Value) -> tuple[Any, Any]:
    """Returns the values of the medians, and how far below and above them the others are."""
    middle, low, high = (
        np.array([value(row, getattr(row, of)) for row in rows])
        for of in ("median", "low", "high")
    )
    # A longer time is a smaller share.
    return middle, (middle - np.minimum(low, high), np.maximum(low, high) - middle)


def _points(
    axes: Axes, name: str, at: Any, values: Any, spread: Any, width: float = 0, **look: Any
) -> None:
    look = {"color": COLOURS[name], "markersize": 5, **MARKERS[name], **look}
    axes.errorbar(at, values, yerr=spread, linestyle="none", elinewidth=1, **look)


def _bars(axes: Axes, name: str, at: Any, values: Any, spread: Any, **look: Any) -> None:
    look = {"color": COLOURS[name], "error_kw": {"elinewidth": 0.8}, **look}
    axes.bar(at, values, yerr=spread, **look)


def _in_words(shape: Shape, size: int) -> str:
    """Returns three lines: batch and channels, what is spatial, and bytes."""
    spatial = f"\nx{shape_name(shape[2:])}" if shape[2:] else ""
    unit = f"{size / MIB:.3g} MiB" if size >= MIB else f"{size / 2**10:.3g} KiB"
    return f"{shape_name(shape[:2])}{spatial}\n{unit}"


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Writes the labels of all panels below them, each once."""
    labels: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    if PARTS in labels:  # last
        labels[PARTS] = labels.pop(PARTS)
    if labels:
        place, columns = "outside lower center", min(len(labels), 4)
        figure.legend(list(labels.values()), list(labels), loc=place, ncols=columns)
