"""Draws the accuracy experiment: error by mean and count, and case by case."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from experiments.lab import rows
from experiments.lab.experiment import Files
from experiments.lab.figures import BLACK, BLUE, PEERS, VERMILION, save
from experiments.lab.peers import names

from . import cases, claims
from .cases import CONSTANT, COUNT, RATIO
from .claims import Row

# Two layers of one package mostly give the same: a line, and open markers on it.
CIRCLES = {"linestyle": "", "marker": "o", "markerfacecolor": "none", "markersize": 7}
STYLE: dict[str, dict[str, Any]] = {
    names.OURS: {"linewidth": 2.4, "marker": "o", "markersize": 4, "zorder": 4},
    names.EQUINOX_EMA: {"linestyle": "-"},
    names.EQUINOX_BATCH: CIRCLES,
    names.LINEN: {"linestyle": "--"},
    names.NNX: CIRCLES,
    names.LINEN_TWO_PASS: {"linestyle": "-."},
    names.NNX_TWO_PASS: {**CIRCLES, "marker": "s"},
    names.TORCH: {"linestyle": ":", "marker": "s", "markersize": 4},
}
HALF_ULP = 2.0**-24  # of a float32 of order 1
Measured = dict[str, dict[str, float]]  # the error of y, by case and layer


def draw(files: Files) -> list[Path]:
    """Draws this package beside its peers; nothing where only its implementations are."""
    measured: Measured = {}
    for row in rows.load(files.csv(), Row):
        measured.setdefault(row.case, {})[row.layer] = row.y
    layers = list(next(iter(measured.values())))
    if names.OURS_PALLAS in layers:
        return []
    figure = Figure(figsize=(11, 8.4))
    halves = figure.add_gridspec(1, 2, width_ratios=(1, 1.15))
    left, right = (figure.add_subfigure(half) for half in halves)
    ratio, count, constant = left.subplots(3, 1, height_ratios=(1.25, 1, 0.9))
    _sweep(ratio, measured, layers, RATIO)
    ratio.set_xlabel("mean / standard deviation")
    _sweep(count, measured, layers, COUNT)
    count.set_xlabel("values a channel, at mean / standard deviation 1e3")
    _constants(constant, measured, layers[::-1])
    handles, labels = ratio.get_legend_handles_labels()
    left.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=8)
    _errors(right.subplots(), measured, layers)
    return [save(figure, files.figure())]


def _sweep(axes: Axes, measured: Measured, layers: list[str], group: str) -> None:
    """Draws the error of y along the axis of a group of cases."""
    swept = [case for name in measured if (case := cases.BY_NAME[name]).group == group]
    at = [case.at for case in swept]
    for layer in layers:
        # A logarithmic axis has neither zero nor infinity: they are drawn at its ends.
        values = np.clip([measured[case.name][layer] for case in swept], 1e-8, 1e8)
        axes.plot(at, values, label=layer, color=PEERS[layer], **STYLE[layer])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=5e-9)
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.minorticks_off()
    axes.set_ylabel("error of y")
    # The labels lie outside: between the two lines is where eqx-norm should be.
    for level, label, side, away in (
        (claims.Y, "the bound of eqx-norm, 1e-6", "bottom", 2),
        (HALF_ULP, "half an ulp of float32", "top", -2),
    ):
        axes.axhline(level, color=BLACK, linewidth=0.8, linestyle=(0, (6, 3)))
        place = {"xytext": (0, away), "textcoords": "offset points", "ha": "right", "va": side}
        axes.annotate(label, (at[-1], level), fontsize=7, **place)


def _constants(axes: Axes, measured: Measured, layers: list[str]) -> None:
    """Draws what a constant channel comes out as, which is zero in exact arithmetic."""
    shown = [cases.BY_NAME[name] for name in measured]
    shown = [case for case in shown if case.group == CONSTANT and not case.affine]
    of_ranges = rows.by(shown, lambda case: case.at)
    for marker, (up_to, of_range) in zip("o^s", of_ranges.items(), strict=True):
        style: Any = {"marker": marker, "linestyle": "", "markerfacecolor": "none"}
        for case, (row, layer) in itertools.product(of_range, enumerate(layers)):
            axes.plot(measured[case.name][layer], row, color=PEERS[layer], **style)
        axes.plot([], [], color=BLACK, label=f"to {up_to:g}", **style)
    axes.legend(title="constants", fontsize=8, title_fontsize=8, loc=(0.13, 0.3))
    axes.set_xscale("symlog", linthresh=1e-8)
    axes.set_xlim(left=-2e-9)
    axes.set_xticks([0, *(10.0**k for k in range(-7, 1))])
    axes.minorticks_off()
    axes.set_yticks(range(len(layers)), layers)
    axes.set_xlabel("largest |y| of a constant channel (exactly: 0)")


def _errors(axes: Axes, measured: Measured, layers: list[str]) -> None:
    """Draws the error of y by case and layer: its exponent as text and colour."""
    table = np.array([list(found.values()) for found in measured.values()])
    exponents = np.log10(np.where(table == 0, 1e-99, table))
    # White is the bound: blue is better, the other end worse.
    scale = LinearSegmentedColormap.from_list("bound", [BLUE, "#FFFFFF", VERMILION])
    scale = scale.with_extremes(bad="#DDDDDD")
    axes.imshow(
        np.clip(exponents, -8, 2), cmap=scale, norm=TwoSlopeNorm(-6, -8, 1), aspect="auto"
    )
    for (row, column), error in np.ndenumerate(table):
        text = "fails" if np.isnan(error) else f"{exponents[row, column]:z.1f}"
        text = {0: "0", np.inf: "inf"}.get(error, text).replace("-", "\N{MINUS SIGN}")
        color = "white" if error > 1 or error < 3e-8 else BLACK
        axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=color)
    axes.set_xticks(range(len(layers)), layers, rotation=40, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(measured)), list(measured))
    groups = [cases.BY_NAME[case].group for case in measured]
    for row in range(1, len(groups)):
        if groups[row] != groups[row - 1]:
            axes.axhline(row - 0.5, color="white", linewidth=3)
    axes.xaxis.tick_top()
    title = "log10 of the error of y: white is the bound, 1e-6; blue is better"
    axes.set_title(title, fontsize=8, y=-0.035)
    axes.tick_params(length=0, labelsize=7.5)
    axes.grid(False)
    axes.spines[:].set_visible(False)
