"""Draws the figure: the peers' times over this layer's, array by array, and how costs grow."""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
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

from .cases import (
    BOTH,
    COLD,
    DTYPES,
    EQUINOX,
    FLAX,
    HOT,
    LAST,
    MIB,
    OWN,
    ROWS,
    Shape,
    shape_name,
)
from .claims import BY_THREE, BY_TWO, GROWS_FROM, growing, growth
from .programs import SUM_OF_PARTS
from .rows import Row, by_shape, chosen, measured

COPY = "as fast as a copy"
GROWTH = f"growth, {BOTH}, f32"
RESIDUAL = f"networks of pre-activation blocks, {BOTH}"
MEDIAN = operator.attrgetter("median")
# What is drawn, and how: shapes for print and for any colour vision. Of several peers the
# fastest on each array counts.
HOLLOW: dict[str, Any] = {"markerfacecolor": "white"}
MARKERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    names.OURS: ((names.OURS,), {"marker": "o", "markersize": 6.5}),
    names.OURS_SEPARATE: ((names.OURS_SEPARATE,), {"marker": "o", "markersize": 6.5, **HOLLOW}),
    names.OURS_PALLAS: ((names.OURS_PALLAS,), {"marker": "P"}),
    names.TORCH: ((names.TORCH,), {"marker": "s"}),
    names.TORCH_COMPILED: ((names.TORCH_COMPILED,), {"marker": "s", **HOLLOW}),
    "Flax": (FLAX, {"marker": "^"}),
    "Equinox": ((names.EQUINOX, *EQUINOX), {"marker": "D"}),
}
# Titles by part, layout and dtype. A figure has one layout of batch norm: that of a CPU, or of
# a GPU; of bf16 a CPU is given few arrays.
BATCH_NORM, LAYER_NORM = (
    "batch norm + ReLU, forward + backward",
    "layer norm, forward + backward",
)
PANELS = {("time", OWN, "f32"): f"{BATCH_NORM}, f32"}
PANELS |= {("time", LAST, d): f"{BATCH_NORM}, channels last, {d}" for d in DTYPES}
PANELS |= {("layer_norm", ROWS, d): f"{LAYER_NORM}, {d}" for d in DTYPES}
Peers = Mapping[str, Row]
Draw = Callable[[Axes], None]


def draw(files: Files) -> list[Path]:
    """Draws what was timed of this layer; nothing, where nothing was."""
    rows = csv.load(files.csv(), Row)
    # By column: the panel of each title, and its height in lines.
    columns: tuple[dict[str, tuple[Draw, int]], ...] = {}, {}
    for (part, layout, dtype), title in PANELS.items():
        timed = measured(rows, "median", part=part, layout=layout, dtype=dtype, program=BOTH)
        found = by_shape(row for row in timed if row.cache != HOT)
        found = {shape: peers for shape, peers in found.items() if names.OURS in peers}
        if found and (dtype == "f32" or timed[0].device != "cpu"):
            title = ", ".join(filter(None, (title, timed[0].cache and COLD)))
            panel = functools.partial(_over_ours, found=found)
            columns[part != "time"][title] = panel, len(found)
    if grown := measured(rows, "median", part="growth"):
        columns[1][GROWTH] = functools.partial(_growth, rows=grown), 10
    if counted := measured(rows, "units", part="residual"):
        columns[1][RESIDUAL] = functools.partial(_residual, rows=counted), 8
    drawn = [column for column in columns if column]
    if not drawn:
        return []
    lines = max(sum(3 + height for _, height in column.values()) for column in drawn)
    figure = Figure(figsize=(12, 1 + 0.22 * lines))
    grid = figure.add_gridspec(1, len(drawn))
    for i, column in enumerate(drawn):
        heights = [3 + height for _, height in column.values()]
        places = grid[i].subgridspec(len(column), 1, height_ratios=heights)
        for j, (title, (panel, _)) in enumerate(column.items()):
            axes = figure.add_subplot(places[j])
            axes.set_title(title)
            panel(axes)
    labels: dict[str, Any] = {}
    for axes in figure.axes:
        if axes.get_legend() is None:
            found = zip(*axes.get_legend_handles_labels(), strict=True)
            labels |= {label: handle for handle, label in found}
    if labels:
        figure.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=4)
    return [save(figure, files.figure())]


def _over_ours(axes: Axes, found: Mapping[Shape, Peers]) -> None:
    """Draws a line for each array: times over this layer's median, the largest x on top."""
    shapes = sorted(found, key=math.prod)
    ours = [found[shape][names.OURS] for shape in shapes]
    drawn: list[float] = []
    for name, (among, look) in MARKERS.items():
        entered = [
            (place, min(there, key=MEDIAN), mine.median)
            for place, (shape, mine) in enumerate(zip(shapes, ours, strict=True))
            if (there := [found[shape][peer] for peer in among if peer in found[shape]])
        ]
        if entered:
            places, rows, unit = zip(*entered, strict=True)
            drawn += [row.median / one for row, one in zip(rows, unit, strict=True)]
            label = f"{name} (activation=)" if name == names.OURS else name
            look = {"color": COLOURS[among[0]], **look}
            _points(axes, rows, places, unit, along="x", label=label, **look)
    for place, (shape, mine) in enumerate(zip(shapes, ours, strict=True)):
        if place % 2:
            axes.axhspan(place - 0.5, place + 0.5, color="0.95", lw=0, zorder=0)
        least, label = mine.share, COPY
        # With a small array the time of five calls is that of calling.
        if SUM_OF_PARTS in found[shape] and mine.bytes >= MIB:
            least, label = found[shape][SUM_OF_PARTS].median / mine.median, SUM_OF_PARTS
        if not math.isnan(least):
            drawn.append(least)
            axes.plot(least, place, "|", color=BLACK, markersize=9, label=label)
    axes.set_yticks(range(len(ours)), [_in_words(row) for row in ours], fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.axvline(1, color=COLOURS[names.OURS], lw=0.8, zorder=1)
    axes.set_ylim(-0.5, len(ours) - 0.5)
    log_scale(axes, "x", (1, 2, 3, 5))
    axes.set_xlim(0.8 * min(drawn), 1.25 * max(drawn))  # the spread may go beyond
    axes.set_xlabel("time / time of eqx-norm")


def _growth(axes: Axes, rows: Sequence[Row]) -> None:
    """Draws time over size, and the lines through the larger ones."""
    for name, marker, line in ((BY_TWO, "o", "-"), (BY_THREE, "^", "--")):
        mine = growing(rows)[name]
        values = np.array([math.prod(row.shape) for row in mine])
        _points(axes, mine, values, 1, along="y", marker=marker, markersize=4.5)
        fitted = values[values > GROWS_FROM]
        if len(fitted) > 1:
            exponent, factor = growth(mine)
            label = f"time $\\propto$ N$^{{{exponent:.2f}}}$, {name}"
            axes.plot(fitted, factor * fitted**exponent, line, color=BLACK, lw=1, label=label)
    axes.legend(loc="upper left")
    axes.set_xscale("log", base=2)
    log_scale(axes, "y", (1,))
    axes.set_xlabel("values in x ([N, 64, 16, 16])")
    axes.set_ylabel("ms")


def _residual(axes: Axes, rows: Sequence[Row]) -> None:
    for name in dict.fromkeys(row.peer for row in rows):
        mine = chosen(rows, peer=name)
        blocks = [int(row.program.partition(" ")[0]) for row in mine]
        axes.plot(blocks, [row.units for row in mine], "o-", color=COLOURS[name], label=name)
        axes.set_xticks(blocks)
    axes.legend(loc="upper left")
    axes.set_ylim(0)
    axes.set_xlabel("blocks")
    axes.set_ylabel("bytes moved / bytes of x, a block")


def _points(
    axes: Axes, rows: Sequence[Row], at: Any, unit: Any, *, along: str, **look: Any
) -> None:
    """Draws medians along an axis, and how far the percentiles are from them."""
    low, middle, high = (
        np.array([(r.low, r.median, r.high) for r in rows]).reshape(-1, 3).T / unit
    )
    where = (middle, at) if along == "x" else (at, middle)
    spread: dict[str, Any] = {f"{along}err": (middle - low, high - middle)}
    look = {"color": COLOURS[names.OURS], "markersize": 5, **look}
    axes.errorbar(*where, **spread, linestyle="none", elinewidth=0.8, **look)


def _in_words(row: Row) -> str:
    """Returns the shape and its bytes."""
    size = row.bytes
    unit = f"{size / MIB:.3g} MiB" if size >= MIB else f"{size / 2**10:.3g} KiB"
    return f"{shape_name(row.shape)}   {unit}"
