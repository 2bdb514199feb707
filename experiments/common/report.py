"""Prints tables and verdicts, draws in one style, and saves results, for every experiment."""

import argparse
import contextlib
import csv
import json
import math
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

STARTED = time.perf_counter()
Verdict = tuple[str, str, bool]  # a claim, the measurement, and whether the claim holds
Goal = tuple[str, str, str]  # a goal, the measurement, and what limits it


def parser(name: str, about: str | None, quick: str) -> argparse.ArgumentParser:
    """Returns a parser with `--quick` and `--out`; `quick` says what `--quick` runs.

    From then on SIGTERM ends the process as `sys.exit` does: temporary files are removed, and
    the processes that it has started are awaited.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    made = argparse.ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    of_quick = f"run a small version: {quick}; under 30 seconds; exit with 1 if a claim fails"
    made.add_argument("--quick", action="store_true", help=of_quick)
    out = Path("build") / name
    of_out = f"write to DIR/results and DIR/figures (default: {out})"
    made.add_argument("--out", type=Path, metavar="DIR", default=out, help=of_out)
    return made


def table(header: Sequence[Any], lines: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table with aligned columns, for the terminal and for documents."""
    cells = [[text(cell) for cell in line] for line in (header, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    padded = [map(str.ljust, line, widths) for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def save_csv(
    out: Path, name: str, header: Sequence[str], lines: Iterable[Sequence[Any]], digits: int = 6
) -> None:
    """Writes results/NAME.csv; floats are rounded, so that equal numbers give equal files."""
    path = _file(out, "results", f"{name}.csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows([text(cell, digits) for cell in line] for line in lines)


def text(value: Any, digits: int = 4) -> str:
    """Returns a cell's text: nothing for NaN and `None`, 64x3x3 for a shape."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float | np.floating):
        return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _file(out: Path, folder: str, name: str) -> Path:
    (out / folder).mkdir(parents=True, exist_ok=True)
    return out / folder / name


def publish(
    out: Path,
    name: str,
    *,
    asked: str,
    answer: str,
    tables: Sequence[str],
    verdicts: Sequence[Verdict],
    goals: Sequence[Goal] = (),
    **about: Any,
) -> int:
    """Prints tables, verdicts and goals, and writes results/NAME.json.

    experiments/README.md shows `asked`, `answer` and `tables`. The file also has `about`: the
    settings. Returns the exit status: 1 if a claim does not hold.
    """
    words = {True: "holds", False: "DOES NOT HOLD"}
    lines = [(claim, measured, words[holds]) for claim, measured, holds in verdicts]
    shown = [*tables, table(("claim", "measured", "verdict"), lines)]
    print("", *shown, sep="\n\n")
    if goals:
        print("", table(("aimed at", "measured", "what limits it"), goals), sep="\n")
    result = {
        "asked": asked,
        "answer": answer,
        "environment": about.pop("environment", None) or environment(),
        **about,
        "seconds": round(time.perf_counter() - STARTED, 1),
        "verdicts": verdicts,
        "goals": goals,
        "shown": [each.splitlines() for each in shown],
    }
    text = json.dumps(result, indent=2) + "\n"
    _file(out, "results", f"{name}.json").write_text(text, encoding="utf-8")
    print(f"\nresults and figures are in {out}")
    return int(not all(holds for _, _, holds in verdicts))


def environment(*plugins: str) -> dict[str, Any]:
    """Returns properties on which digits of results depend; none identifies the machine.

    `plugins` are further packages to name, which are not imported.
    """
    device = jax.devices()[0]
    cpuinfo = Path("/proc/cpuinfo")  # Linux's: lines of "name : value"
    said = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    about = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", said, re.MULTILINE))
    found = {
        "device": f"{device.platform}: {device.device_kind}",
        "processor": ", ".join([platform.machine(), *about.values()]),
        "cores": cores(),
        "python": platform.python_version(),
    }
    used = ("jax", "jaxlib", "equinox", "numpy", "optax", "flax", "torch")
    for package in (*filter(sys.modules.__contains__, used), *plugins):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def device_name() -> str:
    """Returns the device's name for files: "nvidia-h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")


def cores() -> int:
    """Returns the number of cores that this process, and so XLA, may use."""
    linux = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1


# Okabe and Ito's colours, distinguishable with any colour vision; line styles for print.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"

_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "figure.constrained_layout.use": True,
}


def figure(width: float, height: float) -> Figure:
    """Returns an empty figure in the common style; width and height are in inches."""
    rcParams.update(_STYLE)  # read when axes are made, too
    return Figure(figsize=(width, height))


def save_figure(out: Path, name: str, drawn: Figure) -> None:
    """Writes figures/NAME.png."""
    # Without the version in its metadata, a file changes only if its content does.
    drawn.savefig(_file(out, "figures", f"{name}.png"), metadata={"Software": None})


def plot_seeds(axes: Axes, values: NDArray[np.floating], **line: Any) -> None:
    """Draws curves [seeds, steps]: the median by step, and the range shaded."""
    measured = ~np.isnan(values).any(axis=0)  # from every seed
    steps, values = np.flatnonzero(measured) + 1, values[:, measured]
    marker = "o" if len(steps) < 20 else None
    axes.plot(steps, np.median(values, axis=0), marker=marker, markersize=3, **line)
    low, high = values.min(axis=0), values.max(axis=0)
    axes.fill_between(steps, low, high, color=line["color"], alpha=0.12, linewidth=0)


def log_scale(axes: Axes, name: str, subs: tuple[int, ...] = (1, 2, 5)) -> None:
    """Makes the axis "x" or "y" logarithmic, with ticks at multiples of powers of ten."""
    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_below(drawn: Figure, **about: Any) -> None:
    """Draws one legend below all panels, with each label once."""
    last_first = drawn.axes[::-1]  # so that the first panel's line is shown
    lines = {str(line.get_label()): line for axes in last_first for line in axes.get_lines()}
    named = {label: line for label, line in lines.items() if not label.startswith("_")}
    drawn.legend(named.values(), named, loc="outside lower center", ncols=len(named), **about)
