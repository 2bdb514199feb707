"""Starts the runs, each a process of its own, and finds where they part."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from eqx_norm.determinism import compare, read
from experiments.lab.rows import by

from .run import Outcome, Run, environment

ROOT = Path(__file__).parents[2]
# Most of a run is one thread that imports and compiles. What runs beside it changes no bits.
AT_ONCE = 2

# Runs that are compared with the first of them, by what they differ in.
Setting = Mapping[str, Run]


class Result(NamedTuple):
    """Holds what one run gave.

    Versions of bits are numbered in the order in which they are met, run by run: 0 are those of
    the first run of the setting.
    """

    setting: str
    run: str
    sum_of_weights: str
    fingerprint: str
    final_loss: str
    parts: str  # where from the first run of the setting; nothing where it does not
    agreed: int  # rows before that
    by_step: tuple[int, ...]  # versions of all that the probes saw in each step
    step: int  # the first in which any run of the setting parts
    by_probe: tuple[int, ...]  # versions of what each of the probes saw in that step


class Probe(NamedTuple):
    probe: str


# The n-th of several runs that are the same. It serves every setting that asks for it.
_Key = tuple[Run, int]


def distinct(settings: Mapping[str, Setting]) -> list[_Key]:
    """Returns the runs that the settings ask for, each once."""
    return list(dict.fromkeys(key for setting in settings.values() for key in _keys(setting)))


def measure(settings: Mapping[str, Setting]) -> tuple[list[Result], list[Probe]]:
    """Returns one result for each run, and the probes in the order of the program."""
    keys = distinct(settings)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        ledgers = [Path(folder, f"{i}.jsonl") for i in range(len(keys))]
        started = pool.map(_started, [run for run, _ in keys], ledgers)
        outcomes = list(tqdm(started, total=len(keys), unit="run", disable=None))
        seen = dict(zip(keys, zip(outcomes, ledgers, strict=True), strict=True))
        found = [row for name, of in settings.items() for row in _compared(name, of, seen)]
        rows = read(ledgers[0]).rows
        return found, [Probe(row.label) for row in rows if row.step == rows[0].step]


def _compared(
    name: str, setting: Setting, seen: Mapping[_Key, tuple[Outcome, Path]]
) -> Iterator[Result]:
    outcomes, ledgers = zip(*(seen[key] for key in _keys(setting)), strict=True)
    verdicts = [compare(ledgers[0], ledger) for ledger in ledgers]
    steps = [_by_step(ledger) for ledger in ledgers]
    step = min((v.step for v in verdicts if v.step is not None), default=0)
    columns = versions(steps), versions([of_run[step] for of_run in steps])
    for run, outcome, verdict, by_step, by_probe in zip(
        setting, outcomes, verdicts, *columns, strict=True
    ):
        yield Result(
            name,
            run,
            *outcome,
            parts="" if verdict.same else verdict.text.splitlines()[0],
            agreed=verdict.agreed,
            by_step=by_step,
            step=step,
            by_probe=by_probe,
        )


def _keys(setting: Setting) -> list[_Key]:
    runs = list(setting.values())
    return [(run, runs[:i].count(run)) for i, run in enumerate(runs)]


def _started(run: Run, ledger: Path) -> Outcome:
    described = json.dumps(dataclasses.asdict(run))
    finished = subprocess.run(
        [sys.executable, "-m", "experiments.determinism.run", described, os.fspath(ledger)],
        cwd=ROOT,
        env=environment(run),
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(f"{run} ended with {finished.returncode}:\n{finished.stderr}")
    return Outcome(**json.loads(finished.stdout))


def _by_step(ledger: Path) -> list[tuple[str | None, ...]]:
    """Returns what the probes saw, step by step."""
    steps = by(read(ledger).rows, lambda row: row.step)
    return [tuple(row.fingerprint for row in rows) for rows in steps.values()]


def versions(runs: Sequence[Sequence[Hashable]]) -> list[tuple[int, ...]]:
    """Returns, place by place, the number of what is there in the order of first meeting it."""
    numbered = []
    for place in zip(*runs, strict=True):
        numbers = {seen: i for i, seen in enumerate(dict.fromkeys(place))}
        numbered.append([numbers[seen] for seen in place])
    return list(zip(*numbered, strict=True))
