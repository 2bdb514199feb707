"""Draws which bits each run gave, by step and by probe."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from experiments.lab import figures, rows
from experiments.lab.experiment import Files
from experiments.lab.figures import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

from .claims import by_setting, described, parting
from .runs import Probe, Result

# The bits of the first run, and others.
COLORS = ListedColormap([SKY, VERMILION, ORANGE, GREEN, PURPLE, BLUE])


def draw(files: Files) -> list[Path]:
    settings = by_setting(rows.load(files.csv(), Result))
    probes = [probe.replace("`", "") for (probe,) in rows.load(files.csv("_probes"), Probe)]
    sizes = [len(found) for found in settings.values()]
    figure = Figure(figsize=(11, 0.19 * sum(sizes) + 0.5 * len(sizes) + 1.8))
    panels = figure.subplots(len(settings), 2, sharex="col", squeeze=False, height_ratios=sizes)
    for (left, right), (name, found) in zip(panels, settings.items(), strict=True):
        _matrix(left, [row.by_step for row in found])
        _matrix(right, [row.by_probe for row in found])
        left.set_yticks(range(len(found)), [row.run for row in found], fontsize=7)
        right.set_yticks([])
        left.set_title(f"{name}: {described(found)}", loc="left", fontsize=9)
        right.set_title(parting(found), loc="left", fontsize=8)
    left, right = panels[-1]
    left.set_xlabel("training step")
    right.set_xticks(range(len(probes)), probes, rotation=90, fontsize=5.5)
    right.set_xlabel("what the probes saw in the step in which they part, in order")
    figure.suptitle(
        "Runs on MNIST, one a row. Light blue: the bits of the first; other colours: other bits"
    )
    return [figures.save(figure, files.figure())]


def _matrix(axes: Axes, versions: Sequence[Sequence[int]]) -> None:
    numbers = np.array(versions)
    numbers = np.where(numbers, 1 + (numbers - 1) % (COLORS.N - 1), 0)
    axes.imshow(COLORS(numbers), aspect="auto", interpolation="nearest")
    axes.set_yticks(np.arange(len(numbers) - 1) + 0.5, minor=True)
    axes.grid(False)
    axes.grid(which="minor", axis="y", color="white", linewidth=1.5, alpha=1)
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
