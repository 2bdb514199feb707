"""The figure of what was measured on a GPU, drawn from its result file.

Drawing never measures: `python -m experiments.gpu_run_figure` redraws the committed ones.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from . import command, gpu_run_claims, gpu_run_rows
from .benchmark_layers import BOTH
from .gpu_run_claims import Timings
from .gpu_run_contenders import AUTO, EQUINOX, FLAX, XLA
from .gpu_run_job import LAST, ROWS
from .gpu_run_rows import LAYER_NORM, LAYERS
from .gpu_run_torch import COMPILED, TORCH

# The colours, and with them the style of every figure here.
from .stability_figures import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION

COLOURS = {
    AUTO: BLUE,
    XLA: SKY,
    EQUINOX: VERMILION,
    FLAX: GREEN,
    TORCH: ORANGE,
    COMPILED: "#B8860B",
}


def _panel(axes: Axes, found: Timings, part: str, layout: str, dtype: str) -> None:
    """Bars for each array, of forward + backward, as shares of a copy's bandwidth."""
    mine = {
        key[1]: contenders
        for key, contenders in found.items()
        if (key[0], *key[2:]) == (part, layout, dtype, BOTH)
    }
    arrays = sorted(mine, key=lambda what: -max(row.bytes for row in mine[what].values()))
    names = [name for name in COLOURS if any(name in mine[what] for what in arrays)]
    width = 0.84 / max(1, len(names))
    for i, name in enumerate(names):
        at = [k for k, what in enumerate(arrays) if name in mine[what]]
        rows = [mine[arrays[k]][name] for k in at]
        share = np.array([row.share for row in rows])
        # A longer time is a smaller share.
        quartiles = [
            [row.share * (1 - row.median / row.high) for row in rows],
            [row.share * (row.median / row.low - 1) for row in rows],
        ]
        label = f"{name} (this)" if name == AUTO else name
        offset = (i - (len(names) - 1) / 2) * width
        axes.bar(
            np.array(at) + offset,
            share,
            width,
            yerr=quartiles,
            color=COLOURS[name],
            error_kw={"elinewidth": 0.8},
            label=label,
        )
    axes.axhline(1, color=BLACK, lw=0.8)
    axes.axhline(gpu_run_claims.SHARE, color=BLACK, lw=0.8, ls=":")
    axes.set_xticks(range(len(arrays)), arrays, rotation=30, ha="right", fontsize=7)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.set_ylabel("share of copy bandwidth")
    what = "batch norm + ReLU, channels last" if part == LAYERS else "layer norm"
    axes.set_title(f"{what}, forward + backward, {dtype}")


def draw(out: Path, stem: str) -> list[Path]:
    """From the CSV under `out`; none, where nothing was timed."""
    found = gpu_run_claims.timings(gpu_run_rows.load(out / "results" / f"{stem}.csv"))
    layouts = {LAYERS: LAST, LAYER_NORM: ROWS}
    panels = [
        (part, layout, dtype)
        for part, layout in layouts.items()
        for dtype in dict.fromkeys(key[3] for key in found if key[0] == part)
    ]
    if not panels:
        return []
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, 3.2 * len(panels)), squeeze=False)
    for panel, place in zip(panels, axes[:, 0], strict=True):
        _panel(place, found, *panel)
    figure.legend(
        *_all_labels(list(axes[:, 0])), loc="outside lower center", ncols=len(COLOURS)
    )
    path = out / "figures" / f"{stem}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version in its metadata, a figure changes only when its content does.
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
    return [path]


def _all_labels(axes: Sequence[Axes]) -> tuple[list, list]:
    """Of all panels, each once."""
    labels = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    return list(labels.values()), list(labels)


def draw_all(out: Path) -> list[Path]:
    """Draws every result file under `out`, and returns the figures."""
    stems = sorted(path.stem for path in (out / "results").glob("gpu_nvidia*.csv"))
    return [figure for stem in stems for figure in draw(out, stem)]


def main(arguments: Sequence[str] | None = None) -> int:
    return command.redraw("gpu_run_figure", __doc__, draw_all, arguments)


if __name__ == "__main__":
    sys.exit(main())
