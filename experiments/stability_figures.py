"""The three figures of the stability experiment, drawn from its result files.

Drawing never trains: `python -m experiments.stability_figures` redraws the committed ones.
"""

import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from . import command, stability_runs
from .lab.training import Record
from .stability_runs import FIGURE_1, FIGURE_2, FIGURE_3, MOMENTA, Runs, Setting

# Okabe and Ito's colours, told apart with any colour vision; line styles for print.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
STYLE: dict[str, dict[str, Any]] = {
    "none": {"color": BLACK, "linestyle": "-"},
    "batch": {"color": BLUE, "linestyle": "-"},
    "ema": {"color": VERMILION, "linestyle": "-"},
    "adam": {"color": ORANGE, "linestyle": "--"},
    "smooth_start": {"color": GREEN, "linestyle": "-."},
    "variance_clip": {"color": PURPLE, "linestyle": ":"},
}
MODULE_COLORS = [BLACK, BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY]

plt.rcParams.update(
    {
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
)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version in its metadata, a figure changes only when its content does.
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
    return path


def _lines(
    axes: Axes, runs: Runs, setting: Setting, of: Callable[[Record], NDArray], label: str
) -> None:
    """Median over the seeds, with the range shaded; only the steps that were measured."""
    values = np.stack([of(record) for record in runs[setting].values()])
    steps = np.arange(1, values.shape[1] + 1)
    measured = ~np.isnan(values).any(axis=0)
    steps, values = steps[measured], values[:, measured]
    style = STYLE[setting.approach]
    marker = "o" if len(steps) < 20 else None
    axes.plot(
        steps, np.median(values, axis=0), label=label, marker=marker, markersize=3, **style
    )
    axes.fill_between(
        steps, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.12, lw=0
    )


def _log_scale(set_scale: Callable[[str], object], axis: Axis) -> None:
    """Logarithmic, with ticks at 1, 2, 5, 10 written as such."""
    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _largest_norm(record: Record) -> NDArray:
    return record.gradient_norms.max(axis=0)


def gradients(gradients_csv: Path, path: Path) -> Path:
    """Figure 1: the norm of every gradient, and the loss, of one seed."""
    with gradients_csv.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    about = ("approach", "momentum", "seed", "step", "loss")
    leaves = [name for name in rows[0] if name not in about]
    modules = list(dict.fromkeys(leaf.rsplit(".", 1)[0] for leaf in leaves))
    # More modules than colours that can be told apart: a scale, from input to output.
    scale = matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(modules)))
    colors = MODULE_COLORS if len(modules) <= len(MODULE_COLORS) else list(scale)
    settings = list(
        dict.fromkeys(Setting(row["approach"], float(row["momentum"])) for row in rows)
    )
    figure, axes = plt.subplots(
        2, len(settings), figsize=(2.6 * len(settings) + 1.2, 4.6), sharex=True, sharey="row"
    )
    axes = axes.reshape(2, len(settings))
    for column, setting in enumerate(settings):
        mine = [r for r in rows if Setting(r["approach"], float(r["momentum"])) == setting]
        steps = [int(row["step"]) for row in mine]
        top, bottom = axes[:, column]
        for leaf in leaves:
            # A network without normalisation has no such leaf.
            values = [float(row[leaf] or "nan") for row in mine]
            module, kind = leaf.rsplit(".", 1)
            color = colors[modules.index(module)]
            linestyle = "-" if kind == "weight" else ":"
            top.plot(steps, values, color=color, linestyle=linestyle, label=leaf)
        bottom.plot(steps, [float(row["loss"]) for row in mine], color=BLACK)
        top.set_title(setting.label)
        bottom.set_xlabel("training step")
    axes[0, 0].set_ylabel("gradient norm of each parameter")
    axes[1, 0].set_ylabel("training loss")
    axes[1, 0].set_ylim(bottom=0)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    title = f"seed {rows[0]['seed']}"
    figure.legend(handles, labels, loc="outside right center", fontsize=8, title=title)
    return _save(figure, path)


def momenta(runs: Runs, path: Path) -> Path:
    """Figure 2: gradient norm, mean and standard deviation of the output, per momentum."""
    rows: list[tuple[str, Callable[[Record], NDArray]]] = [
        ("largest gradient norm", _largest_norm),
        ("mean of the norm layer's output", lambda record: record.output_mean),
        ("std of the norm layer's output", lambda record: record.output_std),
    ]
    figure, axes = plt.subplots(3, len(MOMENTA), figsize=(9, 7.5), sharex=True, sharey="row")
    for column, momentum in enumerate(MOMENTA):
        for row, (_, of) in enumerate(rows):
            for setting in FIGURE_2:
                if setting in runs and setting.momentum == momentum:
                    _lines(axes[row, column], runs, setting, of, setting.approach)
        axes[0, column].set_title(f"momentum {momentum:g}")
        axes[2, column].set_xlabel("training step")
    for row, (name, _) in enumerate(rows):
        axes[row, 0].set_ylabel(name)
    for row in (0, 2):
        _log_scale(axes[row, 0].set_yscale, axes[row, 0].yaxis)
    axes[1, 0].set_yscale("symlog", linthresh=0.1)
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return _save(figure, path)


def seeds(runs: Runs, settings: Sequence[Setting], path: Path) -> Path:
    """Figure 3: loss, largest gradient norm and test accuracy over the seeds."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.6))
    for setting in settings:
        _lines(axes[0], runs, setting, lambda record: record.loss, setting.label)
        _lines(axes[1], runs, setting, _largest_norm, setting.label)
        _lines(axes[2], runs, setting, lambda record: 100 * record.accuracy, setting.label)
    axes[0].set_ylabel("training loss")
    axes[1].set_ylabel("largest gradient norm")
    axes[2].set_ylabel("test accuracy, inference mode, %")
    for panel in axes:
        panel.set_xlabel("training step")
    _log_scale(axes[0].set_yscale, axes[0].yaxis)
    _log_scale(axes[1].set_yscale, axes[1].yaxis)
    _log_scale(axes[2].set_xscale, axes[2].xaxis)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return _save(figure, path)


def draw(folder: Path, stem: str) -> list[Path]:
    """All three, from the CSVs under `folder`; a selection of settings has only the third."""
    runs = stability_runs.load(folder / "results" / f"{stem}.csv")
    figures = folder / "figures"
    drawn = []
    if all(setting in runs for setting in FIGURE_1):
        csv_path = folder / "results" / f"{stem}_gradients.csv"
        drawn.append(gradients(csv_path, figures / f"{stem}_1_gradients.png"))
    if all(setting in runs for setting in FIGURE_2):
        drawn.append(momenta(runs, figures / f"{stem}_2_momenta.png"))
    shown = FIGURE_3 if all(setting in runs for setting in FIGURE_3) else tuple(runs)
    drawn.append(seeds(runs, shown, figures / f"{stem}_3_seeds.png"))
    return drawn


def draw_all(out: Path) -> list[Path]:
    """Draws the result file of every network under `out`, and returns the figures."""
    stems = ("stability", "stability_large")
    found = [stem for stem in stems if (out / "results" / f"{stem}.csv").exists()]
    return [figure for stem in found for figure in draw(out, stem)]


def main(arguments: Sequence[str] | None = None) -> int:
    return command.redraw("stability_figures", __doc__, draw_all, arguments)


if __name__ == "__main__":
    sys.exit(main())
