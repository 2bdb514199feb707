"""The figures of the variance clipping experiment, drawn from its result file.

Drawing never trains: `python -m experiments.variance_clipping_figures` redraws the committed
ones.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from . import command, variance_clipping_runs

# With these come the fonts and grids of all figures.
from .stability_figures import BLACK, BLUE, VERMILION
from .variance_clipping_corruptions import CLEAN, ONE_IMAGE, SCALED
from .variance_clipping_runs import CORRUPTED, QUANTITIES, Curves, Setting

# A figure of each.
DRAWN = {SCALED: "variance_clipping_scaled.png", ONE_IMAGE: "variance_clipping_one_image.png"}

# By whether clipped, and whether corrupted.
STYLE: dict[tuple[bool, bool], tuple[str, dict[str, Any]]] = {
    (False, False): ("no corrupted batch", {"color": BLACK, "linestyle": ":"}),
    (False, True): ("without clipping", {"color": VERMILION, "linestyle": "-"}),
    (True, True): ("with clipping", {"color": BLUE, "linestyle": "--"}),
}
LABELS = {
    "loss": "training loss",
    "training_accuracy": "training accuracy, %",
    "running_variance": "running variance,\nmean over channels",
    "test_accuracy": "test accuracy,\ninference mode, %",
}


def settings(approaches: Iterable[str]) -> set[Setting]:
    """What the figures are drawn from."""
    return {
        Setting(approach, clipped, corruption if corrupted else CLEAN)
        for approach in approaches
        for corruption in DRAWN
        for clipped, corrupted in STYLE
    }


def _line(axes: Axes, curves: Curves, setting: Setting, quantity: str) -> None:
    """Median over the seeds, with the range shaded; only the steps that were measured."""
    tables = np.stack(list(curves[setting].values()))
    steps, values = tables[0, :, 0], tables[:, :, 1 + QUANTITIES.index(quantity)]
    measured = ~np.isnan(values).any(axis=0)
    steps, values = steps[measured], values[:, measured]
    if quantity.endswith("accuracy"):
        values = 100 * values
    label, style = STYLE[setting.clipped, setting.corruption != CLEAN]
    axes.plot(steps, np.median(values, axis=0), label=label, **style)
    axes.fill_between(
        steps, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.15, lw=0
    )


def panels(curves: Curves, corruption: str, path: Path) -> Path:
    """Loss, training accuracy, running variance and test accuracy; a column per approach."""
    approaches = list(dict.fromkeys(setting.approach for setting in curves))
    figure, axes = plt.subplots(
        len(LABELS),
        len(approaches),
        figsize=(3.2 * len(approaches) + 0.6, 8.8),
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    for row, (quantity, label) in enumerate(LABELS.items()):
        for column, approach in enumerate(approaches):
            panel = axes[row, column]
            for clipped, corrupted in STYLE:
                setting = Setting(approach, clipped, corruption if corrupted else CLEAN)
                _line(panel, curves, setting, quantity)
            for step in CORRUPTED:
                panel.axvline(step, color=BLACK, linewidth=0.6, alpha=0.6, zorder=0)
        axes[row, 0].set_ylabel(label)
        if quantity.endswith("accuracy"):
            axes[row, 0].set_ylim(0, 100)
        else:
            axes[row, 0].set_yscale("log")
    for column, approach in enumerate(approaches):
        axes[0, column].set_title(approach)
        axes[-1, column].set_xlabel("training step")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    lines = figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    lines.set_title(
        f"vertical lines: the corrupted batches, {corruption}; shaded: the range over "
        f"{len(next(iter(curves.values())))} seeds"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version in its metadata, a figure changes only when its content does.
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
    return path


def draw(folder: Path) -> list[Path]:
    """From the CSV under `folder`."""
    curves = variance_clipping_runs.load_curves(
        folder / "results" / "variance_clipping_curves.csv"
    )
    return [
        panels(curves, corruption, folder / "figures" / name)
        for corruption, name in DRAWN.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    return command.redraw("variance_clipping_figures", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
