"""The three figures of the stability experiment."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab import figures as look
from experiments.lab import rows
from experiments.lab.curves import by_setting
from experiments.lab.experiment import Files

from .claims import Runs
from .runs import FIGURE_1, FIGURE_2, FIGURE_3, MOMENTA, Gradient, Setting, Step

STYLE: dict[str, dict[str, Any]] = {
    "none": {"color": look.BLACK, "linestyle": "-"},
    "batch": {"color": look.BLUE, "linestyle": "-"},
    "ema": {"color": look.VERMILION, "linestyle": "-"},
    "adam": {"color": look.ORANGE, "linestyle": "--"},
    "smooth_start": {"color": look.GREEN, "linestyle": "-."},
    "variance_clip": {"color": look.PURPLE, "linestyle": ":"},
}


def draw(files: Files) -> list[Path]:
    """Draws all three; a selection of settings has only the third."""
    steps = rows.load(files.csv(), Step)
    runs = by_setting(steps, Setting)
    drawn = []
    if runs.keys() >= set(FIGURE_1):
        found = rows.load(files.csv("_gradients"), Gradient)
        drawn.append(gradients(found, steps, files.figure("_1_gradients")))
    if runs.keys() >= set(FIGURE_2):
        drawn.append(momenta(runs, files.figure("_2_momenta")))
    shown = FIGURE_3 if runs.keys() >= set(FIGURE_3) else tuple(runs)
    return [*drawn, seeds(runs, shown, files.figure("_3_seeds"))]


def gradients(found: Sequence[Gradient], steps: Sequence[Step], path: Path) -> Path:
    """Draws figure 1: the gradient norm of every parameter, and the loss, of one seed."""
    seed = found[0].seed
    of_module: defaultdict[Setting, defaultdict[str, list[Gradient]]]
    of_module = defaultdict(lambda: defaultdict(list))
    for row in found:
        of_module[Setting(row.approach, row.momentum)][row.module].append(row)
    # A network without normalisation lacks some of them.
    modules = list(max(of_module.values(), key=len))
    colors = [look.BLACK, look.BLUE, look.VERMILION, look.GREEN, look.ORANGE, look.PURPLE]
    if len(modules) > len(colors):  # a scale then, from input to output
        colors = list(matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(modules))))
    figure = Figure(figsize=(2.6 * len(of_module) + 1.2, 4.6))
    axes = figure.subplots(2, len(of_module), sharex=True, sharey="row")
    for (setting, norms), (top, bottom) in zip(of_module.items(), axes.T, strict=True):
        for module, color in zip(modules, colors, strict=False):
            for kind, linestyle in (("weight", "-"), ("bias", ":")):
                values = [getattr(row, kind) for row in norms[module]]
                line = {"color": color, "linestyle": linestyle, "label": f"{module}.{kind}"}
                top.plot([row.step for row in norms[module]], values, **line)
        mine = [step for step in steps if (*step[:2], step.seed) == (*setting, seed)]
        bottom.plot(
            [step.step for step in mine], [step.loss for step in mine], color=look.BLACK
        )
        top.set_title(setting.label)
        bottom.set_xlabel("training step")
    axes[0, 0].set_ylabel("gradient norm of each parameter")
    axes[1, 0].set_ylabel("training loss")
    axes[1, 0].set_ylim(bottom=0)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    where = "outside right center"
    figure.legend(handles, labels, loc=where, fontsize=8, title=f"seed {seed}")
    return look.save(figure, path)


def momenta(runs: Runs, path: Path) -> Path:
    """Draws figure 2: gradient norm, mean and std of the output, for each momentum."""
    quantities = {
        "largest_gradient_norm": "largest gradient norm",
        "output_mean": "mean of the norm layer's output",
        "output_std": "std of the norm layer's output",
    }
    figure = Figure(figsize=(9, 7.5))
    axes = figure.subplots(len(quantities), len(MOMENTA), sharex=True, sharey="row")
    for row, (quantity, label) in zip(axes, quantities.items(), strict=True):
        row[0].set_ylabel(label)
        for setting in FIGURE_2:
            panel = row[MOMENTA.index(setting.momentum)]
            _line(panel, runs, setting, quantity, setting.approach)
    for column, momentum in zip(axes.T, MOMENTA, strict=True):
        column[0].set_title(f"momentum {momentum:g}")
        column[-1].set_xlabel("training step")
    look.log_scale(axes[0, 0], "y")
    axes[1, 0].set_yscale("symlog", linthresh=0.1)
    look.log_scale(axes[2, 0], "y")
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return look.save(figure, path)


def seeds(runs: Runs, settings: Sequence[Setting], path: Path) -> Path:
    """Draws figure 3: loss, largest gradient norm and test accuracy over the seeds."""
    quantities = {
        "loss": ("training loss", "y"),
        "largest_gradient_norm": ("largest gradient norm", "y"),
        "test_accuracy": ("test accuracy, inference mode, %", "x"),
    }
    figure = Figure(figsize=(10, 3.6))
    axes = figure.subplots(1, 3)
    for panel, (quantity, (label, logarithmic)) in zip(axes, quantities.items(), strict=True):
        for setting in settings:
            _line(panel, runs, setting, quantity, setting.label)
        panel.set_ylabel(label)
        panel.set_xlabel("training step")
        look.log_scale(panel, logarithmic)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return look.save(figure, path)


def _line(axes: Axes, runs: Runs, setting: Setting, quantity: str, label: str) -> None:
    """Draws the median over the seeds, with their range shaded."""
    curves = runs[setting]
    values = 100 * curves[quantity] if quantity == "test_accuracy" else curves[quantity]
    style = STYLE[setting.approach]
    look.median_and_range(axes, curves["step"][0], values, label=label, **style)
