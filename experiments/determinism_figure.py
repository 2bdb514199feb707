"""The figure of the determinism experiment, drawn from its result files.

Drawing never trains: `python -m experiments.determinism_figure` redraws the committed one.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from . import command, determinism_claims, determinism_runs

# With these come the fonts and grids of all figures.
from .stability_figures import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

# The bits of the first run, and others.
COLORS = ListedColormap([SKY, VERMILION, ORANGE, GREEN, PURPLE, BLUE])


def draw(out: Path) -> Path:
    folder = out / "results"
    settings = determinism_claims.by_setting(determinism_runs.load(folder / "determinism.csv"))
    _, *probes = (folder / "determinism_probes.csv").read_text("utf-8").splitlines()
    sizes = [len(rows) for rows in settings.values()]
    figure, panels = plt.subplots(
        len(settings),
        2,
        figsize=(11, 0.19 * sum(sizes) + 0.5 * len(sizes) + 1.8),
        sharex="col",
        squeeze=False,
        height_ratios=sizes,
    )
    for (left, right), (name, rows) in zip(panels, settings.items(), strict=True):
        _matrix(left, [row.by_step for row in rows])
        _matrix(right, [row.by_probe for row in rows])
        left.set_yticks(range(len(rows)), [row.run for row in rows], fontsize=7)
        right.set_yticks([])
        title = f"{name}: {determinism_claims.described(rows)}"
        left.set_title(title, loc="left", fontsize=9)
        right.set_title(determinism_claims.parting(rows), loc="left", fontsize=8)
    left, right = panels[-1]
    left.set_xlabel("training step")
    names = [probe.replace("`", "") for probe in probes]
    right.set_xticks(range(len(probes)), names, rotation=90, fontsize=5.5)
    right.set_xlabel("what the probes saw in the step in which they part, in order")
    figure.suptitle(
        "Runs on MNIST, one a row. Light blue: the bits of the first; other colours: other bits"
    )
    path = out / "figures" / "determinism.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)
    return path


def _matrix(axes: Axes, versions: Sequence[Sequence[int]]) -> None:
    numbers = np.array(versions)
    numbers = np.where(numbers, 1 + (numbers - 1) % (COLORS.N - 1), 0)
    colors = COLORS(numbers)
    axes.imshow(colors, aspect="auto", interpolation="nearest")
    axes.set_yticks(np.arange(len(numbers) - 1) + 0.5, minor=True)
    axes.grid(False)
    axes.grid(which="minor", axis="y", color="white", linewidth=1.5, alpha=1)
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def main(arguments: Sequence[str] | None = None) -> int:
    return command.redraw("determinism_figure", __doc__, lambda out: [draw(out)], arguments)


if __name__ == "__main__":
    sys.exit(main())
