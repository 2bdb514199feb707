"""Draws the errors of pairs as close together as OneFlow's, by their distance from 0."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab import rows
from experiments.lab.experiment import Files
from experiments.lab.figures import BLACK, PEERS, SKY, save
from experiments.lab.peers import names

from .claims import AtMean

STYLE: dict[str, dict[str, Any]] = {
    names.EQUINOX: {"linewidth": 2.6, "alpha": 0.6},
    names.LINEN: {"linestyle": "--"},
    names.LINEN_TWO_PASS: {"linestyle": "-.", "color": SKY},
    names.TORCH: {"linestyle": ":", "linewidth": 2},
    names.OURS: {"linewidth": 2.4, "marker": "o", "markersize": 3},
}
ZERO = 1e-8  # where 0 is drawn, which a logarithmic axis does not have
PAIR_MEAN = 1.834651  # the distance of the pair from zero


def draw(files: Files) -> list[Path]:
    found = rows.load(files.csv("_means"), AtMean)
    figure = Figure(figsize=(10, 4.2))
    output, gradient = figure.subplots(1, 2)
    _panel(output, found, "error", "Error of the output")
    _panel(gradient, found, "dx", "Input gradient of the sum of the output (0 is right)")
    output.legend(loc="upper left")
    figure.suptitle(
        "Layer norm in float32 of two values as close together as OneFlow's pair (0.01 apart)"
    )
    return [save(figure, files.figure())]


def _panel(axes: Axes, found: list[AtMean], quantity: str, title: str) -> None:
    of_layers = rows.by(found, lambda row: row.layer)
    for layer in filter(of_layers.__contains__, STYLE):
        mine = of_layers[layer]
        values = np.nan_to_num([getattr(row, quantity) for row in mine], nan=np.inf)
        look = {"label": layer, "color": PEERS[layer], **STYLE[layer]}
        axes.plot([row.mean for row in mine], np.clip(values, ZERO, 1e4), **look)
    axes.axvline(PAIR_MEAN, color=BLACK, linewidth=0.8, linestyle=(0, (6, 3)))
    place: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    where = (PAIR_MEAN, 1)
    axes.annotate("the pair of the issue", where, (3, -3), va="top", fontsize=8, **place)
    axes.set(title=title, xscale="log", yscale="log", xlabel="distance of the pair from zero")
    ticks = {ZERO: "0", **{10.0**k: f"$10^{{{k}}}$" for k in range(-7, 5, 2)}}
    axes.set_yticks([*ticks], [*ticks.values()])
    axes.minorticks_off()
