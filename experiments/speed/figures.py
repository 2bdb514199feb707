"""Draws the figure: times over this layer's on a CPU, shares of a copy's bandwidth on a GPU."""

import math
from collections.abc import Sequence
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
from .claims import BY_THREE, BY_TWO, GROWS_FROM, SHARE, Rows, growing, growth, side_by_side
from .roofline import PARTS
from .rows import Row

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
BARS = (
    names.OURS,
    names.OURS_XLA,
    names.EQUINOX_BATCH,
    names.EQUINOX,
    names.LINEN,
    names.TORCH,
    names.TORCH_COMPILED,
)


def draw(files: Files) -> list[Path]:
    """Draws what was timed of this layer; nothing, where nothing was."""
    rows = csv.load(files.csv(), Row)
    if any(not math.isnan(row.share) for row in rows):
        figure = _on_a_gpu(rows)
    elif any(
        row.part in ("time", "growth") and row.peer == names.OURS and row.calls for row in rows
    ):
        figure = _on_a_cpu(rows)
    else:
        return []
    return [save(figure, files.figure())]


def _on_a_cpu(rows: Rows) -> Figure:
    timed = [row for row in rows if row.part == "time" and row.peer == names.OURS and row.calls]
    panels = list(dict.fromkeys(row.dtype for row in timed))
    panels += ["growth"] if growing(rows) else []
    # The first in full width, the others side by side, the last of them narrower.
    first, *rest = panels
    layout: Any = [[panel] * 5 for panel in panels]
    if len(rest) == 2:
        layout = [[first] * 5, [rest[0]] * 3 + [rest[1]] * 2]
    figure = Figure(figsize=(9.5, 3.6 * len(layout)))
    axes = figure.subplot_mosaic(layout)
    for panel in panels:
        if panel == "growth":
            _growth(axes[panel], rows)
        else:
            _over_ours(axes[panel], rows, panel)
    _legend(figure, [axes[panel] for panel in panels if panel != "growth"])
    return figure


def _over_ours(axes: Axes, rows: Rows, dtype: str) -> None:
    """Draws time of forward + backward over this layer's: median, and 10 to 90% of rounds."""
    found = {
        shape: peers
        for (part, shape, of, _, program), peers in side_by_side(rows).items()
        if (part, of, program) == ("time", dtype, BOTH) and names.OURS in peers
    }
    shapes = sorted(found, key=math.prod, reverse=True)
    present = [name for name in MARKERS if any(name in peers for peers in found.values())]
    for place, shape in enumerate(shapes):
        if place % 2:
            axes.axvspan(place - 0.5, place + 0.5, color="0.95", lw=0, zorder=0)
        parts = found[shape].get(PARTS)
        # Of a small array the time of five calls is that of calling.
        if parts is not None and parts.bytes >= MIB:
            least = parts.median / found[shape][names.OURS].median
            label = PARTS if place == 0 else ""
            axes.hlines(least, place - 0.42, place + 0.42, color=BLACK, lw=1.2, label=label)
    offsets = np.linspace(-0.32, 0.32, len(present)) if len(present) > 1 else [0.0]
    for name, offset in zip(present, offsets, strict=True):
        mine = [shape for shape in shapes if name in found[shape]]
        unit = np.array([found[shape][names.OURS].median for shape in mine])
        _points(
            axes,
            name,
            np.array([shapes.index(shape) + offset for shape in mine]),
            [found[shape][name] for shape in mine],
            unit,
            label=f"{name} (this)" if name == names.OURS else name,
        )
    ticks = [_in_words(shape, found[shape][names.OURS].bytes) for shape in shapes]
    axes.set_xticks(range(len(shapes)), ticks, fontsize=7.5)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.axhline(1, color=COLOURS[names.OURS], lw=0.8, zorder=1)
    axes.set_xlim(-0.5, len(shapes) - 0.5)
    log_scale(axes, "y")
    axes.set_ylabel("time / time of this layer")
    axes.set_title(f"forward + backward, {dtype}")


def _growth(axes: Axes, rows: Rows) -> None:
    """Draws time over size, and the lines through the larger ones."""
    for name, marker, line in ((BY_TWO, "o", "-"), (BY_THREE, "^", "--")):
        mine = growing(rows).get(name, [])
        values = np.array([math.prod(row.shape) for row in mine])
        _points(axes, names.OURS, values, mine, 1.0, marker=marker, markersize=4.5)
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


def _points(axes: Axes, name: str, at: Any, rows: Rows, unit: Any, **look: Any) -> None:
    low, median, high = (
        np.array([getattr(row, of) for row in rows]) / unit for of in ("low", "median", "high")
    )
    look = {"color": COLOURS[name], "markersize": 5, **MARKERS[name], **look}
    spread = (median - low, high - median)
    axes.errorbar(at, median, yerr=spread, linestyle="none", elinewidth=1, **look)


def _in_words(shape: Shape, size: int) -> str:
    """Returns three lines: batch and channels, what is spatial, and bytes."""
    batch, channels, *spatial = shape
    lines = [
        shape_name((batch, channels)),
        *([f"x{shape_name(tuple(spatial))}"] if spatial else []),
    ]
    in_mib = size >= MIB
    lines.append(f"{size / MIB:.3g} MiB" if in_mib else f"{size / 2**10:.3g} KiB")
    return "\n".join(lines)


def _on_a_gpu(rows: Rows) -> Figure:
    found = side_by_side(rows)
    panels = [
        (part, layout, dtype)
        for part, layout in (("time", LAST), ("layer_norm", ROWS))
        for dtype in dict.fromkeys(key[2] for key in found if key[0] == part)
    ]
    figure = Figure(figsize=(11, 3.2 * len(panels)))
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for panel, place in zip(panels, axes, strict=True):
        _shares(place, rows, *panel)
    _legend(figure, list(axes))
    return figure


def _shares(axes: Axes, rows: Rows, part: str, layout: str, dtype: str) -> None:
    """Draws bars for each array, of forward + backward, as shares of a copy's bandwidth."""
    found = {
        shape: peers
        for (of_part, shape, of_dtype, of_layout, program), peers in side_by_side(rows).items()
        if (of_part, of_dtype, of_layout, program) == (part, dtype, layout, BOTH)
    }
    shapes = sorted(found, key=math.prod, reverse=True)
    present = [name for name in BARS if any(name in peers for peers in found.values())]
    width = 0.84 / max(1, len(present))
    for i, name in enumerate(present):
        at = [k for k, shape in enumerate(shapes) if name in found[shape]]
        mine = [found[shapes[k]][name] for k in at]
        # A longer time is a smaller share.
        quartiles = [
            [row.share * (1 - row.median / row.high) for row in mine],
            [row.share * (row.median / row.low - 1) for row in mine],
        ]
        axes.bar(
            np.array(at) + (i - (len(present) - 1) / 2) * width,
            [row.share for row in mine],
            width,
            yerr=quartiles,
            color=COLOURS[name],
            error_kw={"elinewidth": 0.8},
            label=f"{name} (this)" if name == names.OURS else name,
        )
    axes.axhline(1, color=BLACK, lw=0.8)
    axes.axhline(SHARE, color=BLACK, lw=0.8, ls=":")
    ticks = [shape_name(shape) for shape in shapes]
    axes.set_xticks(range(len(shapes)), ticks, rotation=30, ha="right", fontsize=7)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.set_ylabel("share of copy bandwidth")
    what = "batch norm + ReLU, channels last" if part == "time" else "layer norm"
    axes.set_title(f"{what}, forward + backward, {dtype}")


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
