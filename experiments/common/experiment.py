"""Reads the command line of an experiment, and writes its results and verdicts.

experiment = Experiment("stability", __doc__, quick="6 settings, 2 seeds")
settings = QUICK if experiment.options.quick else FULL
...
experiment.save_figure(draw(runs))
return experiment.publish(asked="...", answer="...", tables=[...], verdicts=judge(runs))
"""

import argparse
import csv
import functools
import json
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .machine import environment
from .report import table, text

Verdict = tuple[str, str, bool]  # a claim, the measurement, and whether the claim holds
Goal = tuple[str, str, str]  # a goal, the measurement, and what limits it


class Experiment:
    """Holds the options of an experiment, and writes its results.

    From then on SIGTERM ends the process as `sys.exit` does: temporary files are removed, and
    the processes that it has started are awaited.
    """

    def __init__(self, name: str, about: str | None, quick: str) -> None:
        """Makes a parser with `--quick` and `--out`; `quick` says what `--quick` runs."""
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        self.started = time.perf_counter()
        self.name = name  # of the files; an experiment with options may change the name
        self.parser = argparse.ArgumentParser(
            prog=f"python -m experiments.{name}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        size = f"run a small version: {quick}; under 30 seconds; exit with 1 if a claim fails"
        self.parser.add_argument("--quick", action="store_true", help=size)
        out = Path("build") / name
        of_out = f"write to DIR/results and DIR/figures (default: {out})"
        self.parser.add_argument("--out", type=Path, metavar="DIR", default=out, help=of_out)

    @functools.cached_property
    def options(self) -> argparse.Namespace:
        """Returns the values of the command line, which is read once."""
        return self.parser.parse_args()

    def save_csv(
        self, header: Sequence[str], lines: Iterable[Any], part: str = "", digits: int = 6
    ) -> None:
        """Writes results/NAME_PART.csv, with rounded floats: equal numbers give equal files."""
        with self._file("results", part, "csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(header)
            writer.writerows([text(cell, digits) for cell in line] for line in lines)

    def save_figure(self, drawn: Figure, part: str = "") -> None:
        """Writes figures/NAME_PART.png."""
        # Without the version in its metadata, a file changes only if its content does.
        drawn.savefig(self._file("figures", part, "png"), metadata={"Software": None})

    def publish(
        self,
        *,
        asked: str,
        answer: str,
        tables: Sequence[str],
        verdicts: Sequence[Verdict],
        goals: Sequence[Goal] = (),
        **about: Any,
    ) -> int:
        """Prints tables, verdicts and goals, and writes results/NAME.json.

        experiments/README.md shows `asked`, `answer` and `tables`. The file also has `about`:
        the settings. Returns the exit status: 1 if a claim does not hold.
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
            "seconds": round(time.perf_counter() - self.started, 1),
            "verdicts": verdicts,
            "goals": goals,
            "shown": [each.splitlines() for each in shown],
        }
        written = json.dumps(result, indent=2) + "\n"
        self._file("results", "", "json").write_text(written, encoding="utf-8")
        print(f"\nresults and figures are in {self.options.out}")
        return int(not all(holds for _, _, holds in verdicts))

    def _file(self, folder: str, part: str, suffix: str) -> Path:
        place = self.options.out / folder
        place.mkdir(parents=True, exist_ok=True)
        name = f"{self.name}_{part}" if part else self.name
        return place / f"{name}.{suffix}"
