"""The figure of the benchmark, drawn from its result file.

Drawing never measures: `python -m experiments.benchmark_figures` redraws the committed ones.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from . import benchmark_runs, benchmark_targets, command
from .benchmark_layers import BOTH, INVARIANT, OURS
from .benchmark_parts import PARTS
from .benchmark_runs import Runs, Shape

# The colours, and with them the style of every figure here.
from .stability_figures import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

# In this order from left to right; shapes for print and for any colour vision.
STYLE: dict[str, dict[str, Any]] = {
    OURS: {"color": BLUE, "marker": "o", "markersize": 6.5},
    INVARIANT: {"color": BLUE, "marker": "o", "markerfacecolor": "white"},
    "torch": {"color": ORANGE, "marker": "s"},
    "flax linen": {"color": GREEN, "marker": "^"},
    "flax nnx": {"color": SKY, "marker": "v"},
    "equinox batch": {"color": VERMILION, "marker": "D"},
    "equinox ema": {"color": PURPLE, "marker": "X"},
}


def _in_words(shape: Shape) -> str:
    """In two lines: batch and channels, and what is spatial."""
    batch, channels, *spatial = map(str, shape)
    return f"{batch}x{channels}" + (f"\nx{'x'.join(spatial)}" if spatial else "")


def _size(bytes_: int) -> str:
    size, unit = (bytes_ / 2**20, "MiB") if bytes_ >= 2**20 else (bytes_ / 2**10, "KiB")
    return f"{size:.3g} {unit}"


def _plain(axes: Axes, name: str, subs: tuple[int, ...]) -> None:
    """Logarithmic, with ticks written as such."""
    getattr(axes, f"set_{name}scale")("log")
    axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def contestants(axes: Axes, runs: Runs, dtype: str) -> None:
    """Time of forward + backward over this layer's: median, and 10 to 90% of the rounds."""
    mine = [r for r in runs if (r.part, r.dtype) == ("layer", dtype) and r.calls]
    both = {(row.contestant, row.shape): row for row in mine if row.program == BOTH}
    units = {shape: row.median for (name, shape), row in both.items() if name == OURS}
    shapes = sorted(units, key=math.prod, reverse=True)
    present = [name for name in STYLE if any(key[0] == name for key in both)]
    for place, shape in enumerate(shapes):
        if place % 2:
            axes.axvspan(place - 0.5, place + 0.5, color="0.95", lw=0, zorder=0)
        parts = both.get((PARTS, shape))
        # Of a small array the time of five calls is that of calling.
        if parts is not None and parts.bytes >= benchmark_targets.MIB:
            least = parts.median / units[shape]
            label = PARTS if place == 0 else ""
            axes.hlines(least, place - 0.42, place + 0.42, color=BLACK, lw=1.2, label=label)
    offsets = np.linspace(-0.32, 0.32, len(present)) if len(present) > 1 else [0.0]
    for name, offset in zip(present, offsets, strict=True):
        rows = [both[name, shape] for shape in shapes if (name, shape) in both]
        unit = np.array([units[row.shape] for row in rows])
        low, median, high = (
            np.array([getattr(row, of) for row in rows]) / unit
            for of in ("low", "median", "high")
        )
        axes.errorbar(
            [shapes.index(row.shape) + offset for row in rows],
            median,
            yerr=(median - low, high - median),
            label=f"{name} (this)" if name == OURS else name,
            linestyle="none",
            elinewidth=1,
            **{"markersize": 5, **STYLE[name]},
        )
    sizes = {row.shape: _size(row.bytes) for row in mine}
    axes.set_xticks(
        range(len(shapes)), [f"{_in_words(s)}\n{sizes[s]}" for s in shapes], fontsize=7.5
    )
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.axhline(1, color=STYLE[OURS]["color"], lw=0.8, zorder=1)
    axes.set_xlim(-0.5, len(shapes) - 0.5)
    _plain(axes, "y", (1, 2, 5))
    axes.set_ylabel("time / time of this layer")
    axes.set_title(f"forward + backward, {dtype}")


def growth(axes: Axes, runs: Runs) -> None:
    """Time over size, and the lines through the larger ones."""
    styles = {benchmark_targets.BY_TWO: ("o", "-"), benchmark_targets.BY_THREE: ("^", "--")}
    for name, rows in benchmark_targets.growing(runs).items():
        values = np.array([math.prod(row.shape) for row in rows])
        low, median, high = (
            np.array([getattr(row, of) for row in rows]) for of in ("low", "median", "high")
        )
        marker, line = styles[name]
        axes.errorbar(
            values,
            median,
            yerr=(median - low, high - median),
            linestyle="none",
            elinewidth=1,
            **{**STYLE[OURS], "marker": marker, "markersize": 4.5},
        )
        fitted = values[values > benchmark_targets.GROWS_FROM]
        if len(fitted) > 1:
            exponent, factor = benchmark_targets.growth(rows)
            label = f"time $\\propto$ N$^{{{exponent:.2f}}}$, {name}"
            axes.plot(fitted, factor * fitted**exponent, line, color=BLACK, lw=1, label=label)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper left")
    axes.set_xscale("log", base=2)
    _plain(axes, "y", (1,))
    axes.set_xlabel("values in x ([N, 64, 16, 16])")
    axes.set_ylabel("ms")
    axes.set_title("growth, forward + backward, f32")


def draw(folder: Path, stem: str) -> list[Path]:
    """From the CSV under `folder`; none, where no times of this layer were measured."""
    runs = benchmark_runs.load(folder / "results" / f"{stem}.csv")
    timed = [
        row for row in runs if row.part == "layer" and row.contestant == OURS and row.calls
    ]
    dtypes = list(dict.fromkeys(row.dtype for row in timed))
    panels = [*dtypes, *(["growth"] if any(row.part == "growth" for row in runs) else [])]
    if not panels:
        return []
    layout = _layout(panels)
    figure, axes = plt.subplot_mosaic(layout, figsize=(9.5, 3.6 * len(layout)))
    for panel in panels:
        if panel == "growth":
            growth(axes[panel], runs)
        else:
            contestants(axes[panel], runs, panel)
    if dtypes:
        handles, labels = axes[dtypes[0]].get_legend_handles_labels()
        order = sorted(range(len(labels)), key=lambda i: labels[i] == PARTS)
        figure.legend(
            [handles[i] for i in order],
            [labels[i] for i in order],
            loc="outside lower center",
            ncols=min(len(labels), 4),
        )
    path = folder / "figures" / f"{stem}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version in its metadata, a figure changes only when its content does.
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
    return [path]


def _layout(panels: Sequence[str]) -> Any:
    """The first in full width, the others side by side, the last of them narrower."""
    first, *rest = panels
    if len(rest) < 2:
        return [[panel] * 5 for panel in panels]
    return [[first] * 5, [rest[0]] * 3 + [rest[1]] * 2]


def draw_all(out: Path) -> list[Path]:
    """Draws every result file under `out`, and returns the figures."""
    stems = sorted(path.stem for path in (out / "results").glob("benchmark*.csv"))
    return [figure for stem in stems for figure in draw(out, stem)]


def main(arguments: Sequence[str] | None = None) -> int:
    return command.redraw("benchmark_figures", __doc__, draw_all, arguments)


if __name__ == "__main__":
    sys.exit(main())
