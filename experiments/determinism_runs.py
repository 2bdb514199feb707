"""The runs of the determinism experiment, each a process of its own, and what they gave."""

import csv
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from eqx_norm.determinism import compare, read

from . import results
from .determinism_run import Outcome, Run, environment

ROOT = Path(__file__).parents[1]
# Most of a run is one thread that imports and compiles. What runs beside it changes no bits.
AT_ONCE = 2


@dataclasses.dataclass(frozen=True)
class Setting:
    """Runs that are compared with the first of them. `varied` says by what they differ."""

    name: str
    runs: tuple[Run, ...]
    varied: tuple[str, ...]


class Result(NamedTuple):
    """Of one run. Versions of bits are numbered in the order in which they are met, run by run:
    0 are those of the first run of the setting."""

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


# The n-th of several runs that are the same. It serves every setting that asks for it.
_Key = tuple[Run, int]


def count(settings: Sequence[Setting]) -> int:
    return len({key for setting in settings for key in _keys(setting)})


def measure(
    settings: Sequence[Setting], after: Callable[[], object] = lambda: None
) -> tuple[list[Result], list[str]]:
    """One for each run, and the names of the probes in the order of the program. `after` is
    called `count(settings)` times."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        keys = list(dict.fromkeys(key for setting in settings for key in _keys(setting)))
        ledgers = {key: Path(folder, f"{i}.jsonl") for i, key in enumerate(keys)}

        def start(key: _Key) -> Outcome:
            outcome = _started(key[0], ledgers[key])
            after()
            return outcome

        outcomes = dict(zip(keys, pool.map(start, keys), strict=True))
        found = [row for setting in settings for row in _compared(setting, outcomes, ledgers)]
        rows = read(ledgers[keys[0]]).rows
        return found, [row.label for row in rows if row.step == rows[0].step]


def _compared(
    setting: Setting, outcomes: dict[_Key, Outcome], ledgers: dict[_Key, Path]
) -> Iterator[Result]:
    keys = _keys(setting)
    verdicts = [compare(ledgers[keys[0]], ledgers[key]) for key in keys]
    seen = [_by_step(ledgers[key]) for key in keys]
    step = min((v.step for v in verdicts if v.step is not None), default=0)
    by_step, by_probe = _versions(seen), _versions([steps[step] for steps in seen])
    for i, (key, verdict) in enumerate(zip(keys, verdicts, strict=True)):
        parts = "" if verdict.same else verdict.text.splitlines()[0]
        yield Result(
            setting.name,
            setting.varied[i],
            *outcomes[key],
            parts=parts,
            agreed=verdict.agreed,
            by_step=by_step[i],
            step=step,
            by_probe=by_probe[i],
        )


def _keys(setting: Setting) -> list[_Key]:
    runs = setting.runs
    return [(run, runs[:i].count(run)) for i, run in enumerate(runs)]


def _started(run: Run, ledger: Path) -> Outcome:
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.determinism_run",
            json.dumps(dataclasses.asdict(run)),
            os.fspath(ledger),
        ],
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
    """What the probes saw, step by step."""
    steps: dict[int, list[str | None]] = {}
    for row in read(ledger).rows:
        steps.setdefault(row.step, []).append(row.fingerprint)
    return [tuple(rows) for rows in steps.values()]


def _versions(runs: Sequence[Sequence[Hashable]]) -> list[tuple[int, ...]]:
    """Place by place, the number of what is there, in the order in which it is first met."""
    numbered = []
    for place in zip(*runs, strict=True):
        numbers = {seen: i for i, seen in enumerate(dict.fromkeys(place))}
        numbered.append([numbers[seen] for seen in place])
    return list(zip(*numbered, strict=True))


def save(path: Path, found: Sequence[Result]) -> None:
    rows = [
        [" ".join(map(str, cell)) if isinstance(cell, tuple) else cell for cell in row]
        for row in found
    ]
    results.write_csv(path, Result._fields, rows)


def load(path: Path) -> list[Result]:
    with path.open(newline="", encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    return [
        Result(
            *row[:6],
            agreed=int(row[6]),
            by_step=tuple(map(int, row[7].split())),
            step=int(row[8]),
            by_probe=tuple(map(int, row[9].split())),
        )
        for row in rows
    ]
