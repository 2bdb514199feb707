"""Edits results, to see which verdicts follow."""

import csv
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.lab.experiment import Experiment, Files


class Edit(NamedTuple):
    """Sets columns of the rows that have these values, or one of a tuple of them."""

    where: Mapping[str, Any]
    columns: Mapping[str, Any]  # values, or functions of the row
    suffix: str = ""  # of the file


def edit(files: Files, edits: Sequence[Edit]) -> None:
    for where, columns, suffix in edits:
        with files.csv(suffix).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        allowed = {name: v if isinstance(v, tuple) else (v,) for name, v in where.items()}
        chosen = [row for row in rows if all(row[name] in allowed[name] for name in where)]
        assert chosen, where
        for row in chosen:
            made = {name: v(row) if callable(v) else v for name, v in columns.items()}
            assert made.keys() <= row.keys()
            row.update(made)
        with files.csv(suffix).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def verdicts(experiment: Experiment, files: Files) -> dict[int, bool | None]:
    """Returns whether each claim holds, by its number."""
    judged = experiment.report(files).verdicts
    return {int(verdict.claim.partition(".")[0]): verdict.holds for verdict in judged}


def flipped(experiment: Experiment, files: Files, edits: Sequence[Edit]) -> dict:
    """Edits the files, and returns the verdicts that are others then."""
    before = verdicts(experiment, files)
    edit(files, edits)
    return dict(verdicts(experiment, files).items() - before.items())
