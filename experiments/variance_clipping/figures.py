"""Draws two of the corruptions, step by step."""

from pathlib import Path

from matplotlib.figure import Figure

from experiments.lab import figures as look
from experiments.lab import rows
from experiments.lab.curves import Curves, by_setting
from experiments.lab.experiment import Files

from .runs import CLEAN, CORRUPTED, ONE_IMAGE, SCALED, Setting, Step

# A figure of each, by its suffix.
DRAWN = {SCALED: "_scaled", ONE_IMAGE: "_one_image"}
LABELS = {
    "loss": "training loss",
    "training_accuracy": "training accuracy, %",
    "running_variance": "running variance,\nmean over channels",
    "test_accuracy": "test accuracy,\ninference mode, %",
}


def draw(files: Files) -> list[Path]:
    runs = by_setting(rows.load(files.csv("_curves"), Step), Setting)
    return [
        panels(runs, corruption, files.figure(suffix)) for corruption, suffix in DRAWN.items()
    ]


def panels(runs: dict[Setting, Curves], corruption: str, path: Path) -> Path:
    """Draws loss, training accuracy, running variance and test accuracy, by approach."""
    lines = {
        "no corrupted batch": ((False, CLEAN), {"color": look.BLACK, "linestyle": ":"}),
        "without clipping": ((False, corruption), {"color": look.VERMILION, "linestyle": "-"}),
        "with clipping": ((True, corruption), {"color": look.BLUE, "linestyle": "--"}),
    }
    columns = {
        approach: {
            name: (runs[Setting(approach, *rest)], style)
            for name, (rest, style) in lines.items()
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
