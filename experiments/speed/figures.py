"""Draws the figure: the peers' times over this layer's, and how this layer's grows."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab import rows as csv
from experiments.lab.experiment import Files
from experiments.lab.figures import BLACK, log_scale, save
from experiments.lab.figures import PEERS as COLOURS
from experiments.lab.peers import names

from .cases import BOTH, DTYPES, LAST, MIB, OWN, ROWS, Shape, shape_name
from .claims import BY_THREE, BY_TWO, GROWS_FROM, growing, growth
from .programs import SUM_OF_PARTS
from .rows import Row, by_shape, chosen, measured

# In this order from left to right; shapes for print and for any colour vision.
MARKERS: dict[str, dict[str, Any]] = {
    names.OURS: {"marker": "o", "markersize": 6.5},
    names.OURS_INVARIANT: {"marker": "o", "markerfacecolor": "white"},
    names.OURS_XLA: {"marker": "P"},
    names.TORCH: {"marker": "s"},
    names.TORCH_COMPILED: {"marker": "s", "markerfacecolor": "white"},
    names.LINEN: {"marker": "^"},
    names.NNX: {"marker": "v"},
    names.EQUINOX_BATCH: {"marker": "D"},
    names.EQUINOX_EMA: {"marker": "X"},
    names.EQUINOX: {"marker": "D"},
}
# A figure has one layout of batch norm: that of a CPU, or of a GPU.
BATCH_NORM = "batch norm + ReLU, channels last, "
KINDS = {("time", OWN): "", ("time", LAST): BATCH_NORM, ("layer_norm", ROWS): "layer norm, "}
COPY = "as fast as a copy"
Peers = dict[str, Row]


def draw(files: Files) -> list[Path]:
    """Draws what was timed of this layer; nothing, where nothing was."""
    rows = measured(csv.load(files.csv(), Row), "median")
    on_a_gpu = bool(measured(rows, "share"))
    panels: dict[str, dict[Shape, Peers]] = {}
    for ((part, layout), words), dtype in itertools.product(KINDS.items(), DTYPES):
        found = by_shape(chosen(rows, part=part, layout=layout, dtype=dtype, program=BOTH))
        found = {shape: peers for shape, peers in found.items() if names.OURS in peers}
        if found and (on_a_gpu or part == "time"):
            panels[f"{words}forward + backward, {dtype}"] = found
    titles = [*panels, *(["growth"] if chosen(rows, part="growth") else [])]
    if not titles:
        return []
    # The first in full width, the others side by side, the last of them narrower.
    first, *rest = titles
    mosaic: Any = [[title] * 5 for title in titles]
    if len(rest) == 2:
        mosaic = [[first] * 5, [rest[0]] * 3 + [rest[1]] * 2]
    figure = Figure(figsize=(12 if on_a_gpu else 9.5, 3.6 * len(mosaic)))
    axes = figure.subplot_mosaic(mosaic)
    for title, found in panels.items():
        _over_ours(axes[title], found)
        axes[title].set_title(title)
    if "growth" in titles:
        _growth(axes["growth"], rows)
    _legend(figure, [axes[title] for title in panels])
    return [save(figure, files.figure())]


def _over_ours(axes: Axes, found: dict[Shape, Peers]) -> None:
    """Draws times over this layer's median, and the least that there can be."""
    shapes = sorted(found, key=math.prod, reverse=True)
    peers = [found[shape] for shape in shapes]
    ours = [rows[names.OURS] for rows in peers]
    present = [name for name in MARKERS if any(name in rows for rows in peers)]
    for i, name in enumerate(present):
        at = [place for place, rows in enumerate(peers) if name in rows]
        middle = np.array(at) + (i - (len(present) - 1) / 2) * 0.84 / len(present)
        unit = np.array([ours[place].median for place in at])
        label = f"{name} (this)" if name == names.OURS else name
        _points(axes, name, middle, [peers[place][name] for place in at], unit, label=label)
    axes.grid(visible=False, axis="x")
    for place, (rows, mine) in enumerate(zip(peers, ours, strict=True)):
        if place % 2:
            axes.axvspan(place - 0.5, place + 0.5, color="0.95", lw=0, zorder=0)
        least, label = mine.share, COPY
        # With a small array the time of five calls is that of calling.
        if SUM_OF_PARTS in rows and mine.bytes >= MIB:
            least, label = rows[SUM_OF_PARTS].median / mine.median, SUM_OF_PARTS
        if not math.isnan(least):
            label = label if place == 0 else ""
            axes.hlines(least, place - 0.42, place + 0.42, color=BLACK, lw=1.2, label=label)
    ticks = [_in_words(row) for row in ours]
    axes.set_xticks(range(len(ours)), ticks, fontsize=7.5)
    axes.tick_params(axis="x", length=0)
    axes.axhline(1, color=COLOURS[names.OURS], lw=0.8, zorder=1)
    axes.set_xlim(-0.5, len(ours) - 0.5)
    log_scale(axes, "y")
    axes.set_ylabel("time / time of this layer")


def _growth(axes: Axes, rows: Sequence[Row]) -> None:
    """Draws time over size, and the lines through the larger ones."""
    for name, marker, line in ((BY_TWO, "o", "-"), (BY_THREE, "^", "--")):
        mine = growing(rows)[name]
        values = np.array([math.prod(row.shape) for row in mine])
        _points(axes, names.OURS, values, mine, marker=marker, markersize=4.5)
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


def _points(
    axes: Axes, name: str, at: Any, rows: Sequence[Row], unit: Any = 1, **look: Any
) -> None:
    """Draws medians, and how far the percentiles are from them."""
    low, middle, high = (
        np.array([(r.low, r.median, r.high) for r in rows]).reshape(-1, 3).T / unit
    )
    look = {"color": COLOURS[name], "markersize": 5, **MARKERS[name], **look}
    spread = middle - low, high - middle
    axes.errorbar(at, middle, yerr=spread, linestyle="none", elinewidth=1, **look)


def _in_words(row: Row) -> str:
    """Returns three lines: batch and channels, what is spatial, and bytes."""
    spatial = f"\nx{shape_name(row.shape[2:])}" if row.shape[2:] else ""
    size = row.bytes
    unit = f"{size / MIB:.3g} MiB" if size >= MIB else f"{size / 2**10:.3g} KiB"
    return f"{shape_name(row.shape[:2])}{spatial}\n{unit}"


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Writes the labels of all panels below them, each once; of the least time the last."""
    labels: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    for least in {SUM_OF_PARTS, COPY} & labels.keys():
        labels[least] = labels.pop(least)
    if labels:
        place, columns = "outside lower center", min(len(labels), 4)
        figure.legend(list(labels.values()), list(labels), loc=place, ncols=columns)
