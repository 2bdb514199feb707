"""Draws the three figures of the stability experiment."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.lab import figures as look
from experiments.lab import rows
from experiments.lab.curves import by_setting
from experiments.lab.experiment import Files

from .claims import Runs
from .runs import EMA, FIGURE_1, FIGURE_2, FIGURE_3, MOMENTA, Gradient, Setting, Step

STYLE: dict[str, dict[str, Any]] = {
    "batch": {"color": look.BLUE, "linestyle": "-"},
    "ema": {"color": look.VERMILION, "linestyle": "-"},
    "adam": {"color": look.ORANGE, "linestyle": "--"},
    "smooth_start": {"color": look.GREEN, "linestyle": "-."},
    "variance_clip": {"color": look.PURPLE, "linestyle": ":"},
}


def draw(files: Files) -> list[Path]:
    """Draws all three; of a quick run, which lacks settings, only the third."""
    steps = rows.load(files.csv(), Step)
    runs = by_setting(steps, Setting)
    if not runs.keys() >= {*FIGURE_1, *FIGURE_2}:
        return [seeds(runs, files.figure("_3_seeds"))]
    found = rows.load(files.csv("_gradients"), Gradient)
    return [
        gradients(found, steps, files.figure("_1_gradients")),
        momenta(runs, files.figure("_2_momenta")),
        seeds(runs, files.figure("_3_seeds")),
    ]


def gradients(found: Sequence[Gradient], steps: Sequence[Step], path: Path) -> Path:
    """Draws figure 1: the gradient norm of every parameter, and the loss, of one seed."""
    seed = found[0].seed
    of_setting = rows.by(found, lambda row: Setting(row.approach, row.momentum))
    modules = dict.fromkeys(row.module for row in of_setting[EMA])
    colors = [look.BLACK, look.BLUE, look.VERMILION, look.GREEN, look.ORANGE, look.PURPLE]
    if len(modules) > len(colors):  # a scale then, from input to output
        colors = list(matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(modules))))
    figure = Figure(figsize=(2.6 * len(of_setting) + 1.2, 4.6))
    axes = figure.subplots(2, len(of_setting), sharex=True, sharey="row")
    for (setting, norms), (top, bottom) in zip(of_setting.items(), axes.T, strict=True):
        for module, color in zip(modules, colors, strict=False):
            mine = [row for row in norms if row.module == module]
            for kind, linestyle in (("weight", "-"), ("bias", ":")):
                values = [getattr(row, kind) for row in mine]
                line = {"color": color, "linestyle": linestyle, "label": f"{module}.{kind}"}
                top.plot([row.step for row in mine], values, **line)
        mine = [step for step in steps if step[:3] == (*setting, seed)]
        bottom.plot([s.step for s in mine], [s.loss for s in mine], color=look.BLACK)
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
    columns = {
        f"momentum {momentum:g}": {
            s.approach: (runs[s], STYLE[s.approach]) for s in FIGURE_2 if s.momentum == momentum
        }
        for momentum in MOMENTA
    }
    figure = Figure(figsize=(9, 7.5))
    axes = figure.subplots(len(quantities), len(MOMENTA), sharex=True, sharey="row")
    look.panels(figure, axes, quantities, columns)
    look.log_scale(axes[0, 0], "y")
    axes[1, 0].set_yscale("symlog", linthresh=0.1)
    look.log_scale(axes[2, 0], "y")
    return look.save(figure, path)


def seeds(runs: Runs, path: Path) -> Path:
    """Draws figure 3: loss, largest gradient norm and test accuracy over the seeds."""
    quantities = {
        "loss": "training loss",
        "largest_gradient_norm": "largest gradient norm",
        "test_accuracy": "test accuracy, inference mode, %",
    }
    lines = {s.label: (runs[s], STYLE[s.approach]) for s in FIGURE_3 if s in runs}
    figure = Figure(figsize=(10, 3.6))
    axes = figure.subplots(1, len(quantities))
    look.panels(figure, axes[:, None], quantities, {"": lines})
    for panel, logarithmic in zip(axes, "yyx", strict=True):
        look.log_scale(panel, logarithmic)
        panel.set_xlabel("training step")
    return look.save(figure, path)
