"""The figure of the layer norm experiment, drawn from its result file.

Drawing never measures: `python -m experiments.layer_norm_figure` redraws the committed one.
"""

import csv
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from . import command

# With these come the fonts and grids of all figures.
from .stability_figures import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILION

STYLE: dict[str, dict[str, Any]] = {
    "Equinox": {"color": VERMILION, "linewidth": 2.6, "alpha": 0.6},
    "Flax": {"color": ORANGE, "linestyle": "--"},
    "Flax, two-pass": {"color": GREEN, "linestyle": "-."},
    "PyTorch": {"color": PURPLE, "linestyle": ":", "linewidth": 2},
    "eqx-norm": {"color": BLUE, "linewidth": 2.4, "marker": "o", "markersize": 3},
}
# A logarithmic axis has no zero: it is drawn here.
ZERO = 1e-8
# A pair is too close together to be told apart in float32 from this mean on.
PAIR_MEAN = 1.834651

Curves = dict[str, list[tuple[float, float, float]]]


def draw(out: Path) -> Path:
    curves = _load(out / "results" / "layer_norm_means.csv")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for panel, column, title in (
        (axes[0], 1, "Error of the output"),
        (axes[1], 2, "Input gradient of the sum of the output (0 is right)"),
    ):
        _panel(panel, curves, column)
        panel.set_title(title)
    axes[0].legend(loc="upper left")
    figure.suptitle(
        "Layer norm in float32 of two values as close together as OneFlow's pair (0.01 apart)"
    )
    path = out / "figures" / "layer_norm.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)
    return path


def _panel(axes: Axes, curves: Curves, column: int) -> None:
    for layer, style in STYLE.items():
        if layer in curves:
            rows = np.array(curves[layer])
            values = np.maximum(np.nan_to_num(rows[:, column], nan=np.inf), ZERO)
            axes.plot(rows[:, 0], np.minimum(values, 1e4), label=layer, **style)
    axes.axvline(PAIR_MEAN, color=BLACK, linewidth=0.8, linestyle=(0, (6, 3)))
    axes.annotate(
        "the pair of the issue",
        (PAIR_MEAN, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -3),
        textcoords="offset points",
        va="top",
        fontsize=8,
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("distance of the pair from zero")
    labels = {ZERO: "0"}
    ticks = [ZERO, *(10.0**k for k in range(-7, 5, 2))]
    axes.set_yticks(ticks, [labels.get(t, f"$10^{{{round(np.log10(t))}}}$") for t in ticks])
    axes.minorticks_off()


def _load(path: Path) -> Curves:
    curves: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            mean, y, dx = (float(row[name] or "nan") for name in ("mean", "error of y", "dx"))
            curves[row["layer"]].append((mean, y, dx))
    return dict(curves)


def main(arguments: Sequence[str] | None = None) -> int:
    return command.redraw("layer_norm_figure", __doc__, lambda out: [draw(out)], arguments)


if __name__ == "__main__":
    sys.exit(main())
