"""The figures of the variance clipping experiment: two corruptions, step by step."""

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
    approaches = list(dict.fromkeys(setting.approach for setting in runs))
    figure = Figure(figsize=(3.2 * len(approaches) + 0.6, 8.8))
    axes = figure.subplots(
        len(LABELS), len(approaches), sharex=True, sharey="row", squeeze=False
    )
    for row, (quantity, label) in zip(axes, LABELS.items(), strict=True):
        scale = 100 if quantity.endswith("accuracy") else 1
        for panel, approach in zip(row, approaches, strict=True):
            for (clipped, corrupted), (name, style) in STYLE.items():
                run = runs[Setting(approach, clipped, corruption if corrupted else CLEAN)]
                steps, values = run["step"][0], scale * run[quantity]
                look.median_and_range(panel, steps, values, label=name, **style)
            for step in CORRUPTED:
                panel.axvline(step, color=look.BLACK, linewidth=0.6, alpha=0.6, zorder=0)
        row[0].set_ylabel(label)
        if quantity.endswith("accuracy"):
            row[0].set_ylim(0, 100)
        else:
            row[0].set_yscale("log")
    for column, approach in zip(axes.T, approaches, strict=True):
        column[0].set_title(approach)
        column[-1].set_xlabel("training step")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    lines = figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    seeds = len(next(iter(runs.values()))["step"])
    lines.set_title(
        f"vertical lines: the corrupted batches, {corruption}; shaded: the range over "
        f"{seeds} seeds"
    )
    return look.save(figure, path)
