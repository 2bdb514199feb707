"""Draws two of the corruptions, step by step."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.lab import figures as look
from experiments.lab import rows
from experiments.lab.curves import Curves, by_setting
from experiments.lab.experiment import Files

from .corruptions import CLEAN, ONE_IMAGE, SCALED
from .runs import CORRUPTED, Setting, Step

# A figure of each, by its suffix.
DRAWN = {SCALED: "_scaled", ONE_IMAGE: "_one_image"}

# By whether clipped, and whether corrupted.
STYLE: dict[tuple[bool, bool], tuple[str, dict[str, Any]]] = {
    (False, False): ("no corrupted batch", {"color": look.BLACK, "linestyle": ":"}),
    (False, True): ("without clipping", {"color": look.VERMILION, "linestyle": "-"}),
    (True, True): ("with clipping", {"color": look.BLUE, "linestyle": "--"}),
}
LABELS = {
    "loss": "training loss",
    "training_accuracy": "training accuracy, %",
    "running_variance": "running variance,\nmean over channels",
    "test_accuracy": "test accuracy,\ninference mode, %",
}


def is_drawn(setting: Setting) -> bool:
    corrupted = setting.corruption != CLEAN
    return (setting.clipped, corrupted) in STYLE and setting.corruption in (CLEAN, *DRAWN)


def draw(files: Files) -> list[Path]:
    runs = by_setting(rows.load(files.csv("_curves"), Step), Setting)
    return [
        panels(runs, corruption, files.figure(suffix)) for corruption, suffix in DRAWN.items()
    ]


def panels(runs: dict[Setting, Curves], corruption: str, path: Path) -> Path:
    """Draws loss, training accuracy, running variance and test accuracy, by approach."""
    columns = {
        approach: {
            name: (runs[Setting(approach, clipped, corruption if bad else CLEAN)], style)
            for (clipped, bad), (name, style) in STYLE.items()
        }
        for approach in dict.fromkeys(setting.approach for setting in runs)
    }
    figure = Figure(figsize=(3.2 * len(columns) + 0.6, 8.8))
    axes = figure.subplots(len(LABELS), len(columns), sharex=True, sharey="row", squeeze=False)
    legend = look.panels(figure, axes, LABELS, columns)
    for panel in axes.flat:
        for step in CORRUPTED:
            panel.axvline(step, color=look.BLACK, linewidth=0.6, alpha=0.6, zorder=0)
    for (first, *_), quantity in zip(axes, LABELS, strict=True):
        if quantity.endswith("accuracy"):
            first.set_ylim(0, 100)
        else:
            first.set_yscale("log")
    seeds = len(next(iter(runs.values()))["step"])
    legend.set_title(
        f"vertical lines: the corrupted batches, {corruption}; shaded: the range over "
        f"{seeds} seeds"
    )
    return look.save(figure, path)
