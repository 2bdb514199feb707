"""The three figures of the stability experiment."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from experiments.lab import rows
from experiments.lab.experiment import Files
from experiments.lab.figures import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    log_scale,
    median_and_range,
    save,
)

from .runs import (
    FIGURE_1,
    FIGURE_2,
    FIGURE_3,
    MOMENTA,
    Gradient,
    Runs,
    Setting,
    Step,
    by_setting,
)

STYLE: dict[str, dict[str, Any]] = {
    "none": {"color": BLACK, "linestyle": "-"},
    "batch": {"color": BLUE, "linestyle": "-"},
    "ema": {"color": VERMILION, "linestyle": "-"},
    "adam": {"color": ORANGE, "linestyle": "--"},
    "smooth_start": {"color": GREEN, "linestyle": "-."},
    "variance_clip": {"color": PURPLE, "linestyle": ":"},
}
MODULE_COLORS = [BLACK, BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY]


def gradients(found: Sequence[Gradient], steps: Sequence[Step], path: Path) -> Path:
    """Draws figure 1: the gradient norm of every parameter, and the loss, of one seed."""
    seed = found[0].seed
    of_module: defaultdict[Setting, defaultdict[str, list[Gradient]]]
    of_module = defaultdict(lambda: defaultdict(list))
    for row in found:
        of_module[Setting(row.approach, row.momentum)][row.module].append(row)
    # A network without normalisation lacks some of them.
    modules = list(max(of_module.values(), key=len))
    # More modules than colours that can be told apart: a scale, from input to output.
    scale = matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(modules)))
    colors = MODULE_COLORS if len(modules) <= len(MODULE_COLORS) else list(scale)
    figure = Figure(figsize=(2.6 * len(of_module) + 1.2, 4.6))
    axes = figure.subplots(2, len(of_module), sharex=True, sharey="row")
    for (setting, norms), (top, bottom) in zip(of_module.items(), axes.T, strict=True):
        for module, color in zip(modules, colors, strict=False):
            counted = [row.step for row in norms[module]]
            for kind, linestyle in (("weight", "-"), ("bias", ":")):
                values = [getattr(row, kind) for row in norms[module]]
                label = f"{module}.{kind}"
                top.plot(counted, values, color=color, linestyle=linestyle, label=label)
        mine = [step for step in steps if (*step[:2], step.seed) == (*setting, seed)]
        bottom.plot([step.step for step in mine], [step.loss for step in mine], color=BLACK)
        top.set_title(setting.label)
        bottom.set_xlabel("training step")
    axes[0, 0].set_ylabel("gradient norm of each parameter")
    axes[1, 0].set_ylabel("training loss")
    axes[1, 0].set_ylim(bottom=0)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    title = f"seed {seed}"
    figure.legend(handles, labels, loc="outside right center", fontsize=8, title=title)
    return save(figure, path)


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
            _line(panel, getattr(runs[setting], quantity), setting, setting.approach)
    for column, momentum in zip(axes.T, MOMENTA, strict=True):
        column[0].set_title(f"momentum {momentum:g}")
        column[-1].set_xlabel("training step")
    log_scale(axes[0, 0], "y")
    axes[1, 0].set_yscale("symlog", linthresh=0.1)
    log_scale(axes[2, 0], "y")
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return save(figure, path)


def seeds(runs: Runs, settings: Sequence[Setting], path: Path) -> Path:
    """Draws figure 3: loss, largest gradient norm and test accuracy over the seeds."""
    figure = Figure(figsize=(10, 3.6))
    loss, norm, accuracy = figure.subplots(1, 3)
    for setting in settings:
        curves = runs[setting]
        _line(loss, curves.loss, setting, setting.label)
        _line(norm, curves.largest_gradient_norm, setting, setting.label)
        _line(accuracy, 100 * curves.accuracy, setting, setting.label)
    loss.set_ylabel("training loss")
    norm.set_ylabel("largest gradient norm")
    accuracy.set_ylabel("test accuracy, inference mode, %")
    for panel in (loss, norm, accuracy):
        panel.set_xlabel("training step")
    log_scale(loss, "y")
    log_scale(norm, "y")
    log_scale(accuracy, "x")
    handles, labels = loss.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return save(figure, path)


def _line(axes: Axes, values: NDArray[np.float64], setting: Setting, label: str) -> None:
    """Draws the median over the seeds, with the range shaded."""
    steps = np.arange(1, 1 + values.shape[1])
    median_and_range(axes, steps, values, label=label, **STYLE[setting.approach])


def draw(files: Files) -> list[Path]:
    """Draws all three; a selection of settings has only the third."""
    steps = rows.load(files.csv(), Step)
    runs = by_setting(steps)
    drawn = []
    if runs.keys() >= set(FIGURE_1):
        found = rows.load(files.csv("_gradients"), Gradient)
        drawn.append(gradients(found, steps, files.figure("_1_gradients")))
    if runs.keys() >= set(FIGURE_2):
        drawn.append(momenta(runs, files.figure("_2_momenta")))
    shown = FIGURE_3 if runs.keys() >= set(FIGURE_3) else tuple(runs)
    return [*drawn, seeds(runs, shown, files.figure("_3_seeds"))]
