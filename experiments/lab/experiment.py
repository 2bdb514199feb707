"""Runs an experiment, in the steps that all of them take.

    python -m experiments.NAME             measures, writes rows, and shows tables and figures
    python -m experiments.NAME --quick     under 30 seconds; fails where a claim does not hold
    python -m experiments.NAME --redraw    shows tables and figures of what was measured before

What is measured is written to files first, and whatever is shown, judged or drawn is read from
these files. So a table can be had again from the committed results, to the digit.

    measure(job, files)   writes rows, and returns what is to be noted beside them
    report(files)         reads them, and returns tables and verdicts
    draw(files)           reads them, and returns the figures that it drew
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from . import figures
from .claims import Verdict
from .environment import environment
from .errors import UserError

COMMITTED = Path(__file__).parents[1]

Job = TypeVar("Job")


class Files(NamedTuple):
    """Names what one run writes: `out/results/STEM*.csv` and `out/figures/STEM*.png`."""

    out: Path
    stem: str

    def csv(self, suffix: str = "") -> Path:
        return self.out / "results" / f"{self.stem}{suffix}.csv"

    def figure(self, suffix: str = "") -> Path:
        return self.out / "figures" / f"{self.stem}{suffix}.png"

    @property
    def json(self) -> Path:
        return self.out / "results" / f"{self.stem}.json"


class Report(NamedTuple):
    text: str  # all tables, for the terminal
    verdicts: Sequence[Verdict]
    summary: str = ""  # the tables that documents show, where these are not all
    # What the README's one table says of the thread: this package's numbers, and its peers'.
    ours: str = ""
    peers: str = ""


def with_options(job: Any, options: argparse.Namespace) -> Any:
    """Returns the job with each option that was given in place of its field of that name."""
    given: dict[str, Any] = {}
    for name, value in vars(options).items():
        if value is not None and hasattr(job, name):
            several = isinstance(value, list)
            given[name] = tuple(dict.fromkeys(value)) if several else value
    return dataclasses.replace(job, **given) if given else job


@dataclass(frozen=True)
class Experiment(Generic[Job]):
    """Holds what an experiment is made of; `main` is its command."""

    name: str
    about: str | None  # the docstring that --help shows
    whole: Job
    quick: Job
    measure: Callable[[Job, Files], dict[str, Any]]
    report: Callable[[Files], Report]
    draw: Callable[[Files], list[Path]] = lambda files: []
    thread: str = ""  # what it reproduces, or shows: a link, for the README's table
    # Options of its own: adds them, and changes a job as they ask for (by default: an option
    # that was given, its default being None, replaces the field of its name).
    add_arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    choose: Callable[[Job, argparse.Namespace], Job] = with_options
    # Returns the job without what cannot run here, and why not: by name.
    present: Callable[[Job], tuple[Job, dict[str, str]]] = lambda job: (job, {})
    # Whether a job is the whole one, of which --commit replaces what is committed.
    is_whole: Callable[[Job], bool] | None = None
    stem: Callable[[Job], str] | None = None  # of the files of a job, where there are several
    # Whether the whole job fails, too, where a claim does not hold; or which whole jobs do.
    strict: bool | Callable[[Job], bool] = False

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Runs the command line, and returns the exit code."""
        parser = self.parser()
        options = parser.parse_args(arguments)
        try:
            return self._redraw(options.out) if options.redraw else self._run(options)
        except UserError as error:
            parser.exit(2, f"{error}\n")

    def parser(self) -> argparse.ArgumentParser:
        made = parser(self.name, self.about)
        add, where = made.add_argument, made.add_mutually_exclusive_group()
        quick = "less of everything, in under 30 seconds; exits with 1 if a claim does not hold"
        add("--quick", action="store_true", help=quick)
        redraw = "measures nothing: shows the results in DIR (default: the committed ones)"
        add("--redraw", action="store_true", help=redraw)
        out = f"writes DIR/results and DIR/figures (default: build/{self.name})"
        where.add_argument("--out", type=Path, metavar="DIR", help=out)
        commit = "replaces the committed results; only of the whole job with every peer"
        where.add_argument("--commit", action="store_true", help=commit)
        self.add_arguments(made)
        return made

    def stems(self, out: Path) -> list[str]:
        """Returns the stems of the results of this experiment in a folder."""
        found = sorted(path.stem for path in (out / "results").glob(f"{self.name}*.json"))
        return [stem for stem in found if stem == self.name or self.stem is not None]

    def _run(self, options: argparse.Namespace) -> int:
        chosen = self.choose(self.quick if options.quick else self.whole, options)
        job, left_out = self.present(chosen)
        for name, why in left_out.items():
            print(f"{name} is left out: {why}")
        files = Files(self._folder(options, job), self.stem(job) if self.stem else self.name)
        started = time.perf_counter()
        noted = self.measure(job, files)
        shown, verdicts = self._shown(files)
        seconds = round(time.perf_counter() - started, 1)
        about = {
            "environment": noted.pop("environment", None) or environment(),
            **noted,
            "left out": left_out,
            "seconds": seconds,
            "claims": [
                {"claim": v.claim, "measured": v.measured, "holds": v.holds} for v in verdicts
            ],
        }
        files.json.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        print(f"{shown}\n\nin {seconds} s; results in {files.json.parent}")
        if options.quick:
            return int(any(verdict.quick and not verdict.holds for verdict in verdicts))
        strict = self.strict(job) if callable(self.strict) else self.strict
        return int(strict and any(verdict.holds is False for verdict in verdicts))

    def _redraw(self, out: Path | None) -> int:
        out = out or committed()
        stems = self.stems(out)
        if not stems:
            raise UserError(f"--out: there are no results of {self.name} in {out}/results")
        for stem in stems:
            try:
                print(self._shown(Files(out, stem))[0])
            except FileNotFoundError as error:
                raise UserError(f"--out {out}: there is no {error.filename} to read") from error
        return 0

    def _shown(self, files: Files) -> tuple[str, Sequence[Verdict]]:
        """Draws the figures, and returns all that is to be printed, and the verdicts."""
        report = self.report(files)
        with figures.style():
            drawn = self.draw(files)
        lines = ["\nfigures:", *(f"  {figure}" for figure in drawn)] if drawn else []
        return "\n".join(["", report.text, *lines]), report.verdicts

    def _folder(self, options: argparse.Namespace, job: Job) -> Path:
        """Returns the folder to write to: `--out`, else the committed one or one below `build`.

        The committed results differ by processor, and documents quote them: only the whole job
        replaces them. `results` in the folder is made now rather than after the work.
        """
        whole = job == self.whole if self.is_whole is None else self.is_whole(job)
        if options.commit and not whole:
            raise UserError(
                "--commit: the committed results are those of the whole job with every peer, "
                "and this is less. Leave out what selects a part of it, and run it where all "
                "that it compares with is installed (make experiments), or leave out --commit."
            )
        out = options.out or (committed() if options.commit else Path("build") / self.name)
        try:
            (out / "results").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"{out}/results cannot be made ({error.strerror})"
            raise UserError(f"{why}: name another folder with --out") from error
        return out


def number_from(least: int) -> Callable[[str], int]:
    """Returns the type of an option that is a whole number, `least` or more."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: must be {least} or more")
        return value

    return number


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Returns a parser with nothing but `--help`."""
    return argparse.ArgumentParser(
        prog=f"python -m experiments.{name}".removesuffix("."),
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def committed() -> Path:
    """Returns the folder of the committed results, as short as it can be written from here."""
    return Path(os.path.relpath(COMMITTED))
