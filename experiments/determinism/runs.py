"""Says which runs there are, starts each as a process of its own, and finds where they part."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from eqx_norm.determinism import compare, read
from experiments.lab.rows import by

from .run import Outcome, Run, environment

ROOT = Path(__file__).parents[2]
# Most of a run is one thread that imports and compiles. What runs beside it changes no bits.
AT_ONCE = 2

NO_SEED = "no seed"
SEED = "a seed"
THREADS = "a seed, other threads"
RECIPE = "the recipe"
ON_TWO = "the recipe, 2 devices"
DEVICES = "the recipe, other devices"
FAULT = "the recipe, one bit flipped"

# Runs that are compared with the first of them, by what they differ in.
Setting = Mapping[str, Run]


@dataclass(frozen=True)
class Job:
    """Says what to run. The defaults are the whole job."""

    names: tuple[str, ...] = (NO_SEED, SEED, THREADS, RECIPE, ON_TWO, DEVICES, FAULT)
    repeats: int = 5  # as in the talk
    steps: int = 100
    threads: tuple[int, ...] = (2, 1, 3, 4, 8)
    devices: tuple[int, ...] = (1, 2, 4, 8)
    flipped_at: int = 37
    timed: tuple[str, ...] = ("small", "large")  # of networks.NETWORKS
    rounds: int = 100  # of timing

    @property
    def settings(self) -> dict[str, Setting]:
        def repeated(run: Run, times: int = self.repeats) -> Setting:
            return {f"run {i}": run for i in range(1, times + 1)}

        def over(what: str, numbers: tuple[int, ...], run: Run) -> Setting:
            return {
                f"{n} {what}" + "s" * (n > 1): replace(run, **{f"{what}s": n}) for n in numbers
            }

        run = Run(self.steps)
        recipe = replace(run, recipe=True)
        flipped = replace(recipe, flipped_at=self.flipped_at)
        settings = {
            NO_SEED: repeated(replace(run, seeded=False)),
            SEED: repeated(run),
            THREADS: over("thread", self.threads, run),
            RECIPE: {
                **repeated(recipe, self.repeats - 1),
                "on one core": replace(recipe, cores=1),
            },
            ON_TWO: repeated(replace(recipe, devices=2)),
            DEVICES: over("device", self.devices, recipe),
            FAULT: {"as it is": recipe, f"before step {self.flipped_at}": flipped},
        }
        return {name: settings[name] for name in self.names}


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


def measure(settings: Mapping[str, Setting]) -> tuple[list[Result], list[Probe]]:
    """Returns one result for each run, and the probes in the order of the program."""
    runs = [run for setting in settings.values() for run in setting.values()]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        ledgers = [Path(folder, f"{i}.jsonl") for i in range(len(runs))]
        started = pool.map(_started, runs, ledgers)
        outcomes = list(tqdm(started, total=len(runs), unit="run", disable=None))
        done = zip(outcomes, ledgers, strict=True)
        found = [
            result
            for name, setting in settings.items()
            for result in _compared(name, setting, [*itertools.islice(done, len(setting))])
        ]
        rows = read(ledgers[0]).rows
        return found, [Probe(row.label) for row in rows if row.step == rows[0].step]


def _started(run: Run, ledger: Path) -> Outcome:
    described = json.dumps(asdict(run))
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
    return json.loads(finished.stdout)


def _compared(
    name: str, setting: Setting, done: Sequence[tuple[Outcome, Path]]
) -> Iterator[Result]:
    outcomes, ledgers = zip(*done, strict=True)
    verdicts = [compare(ledgers[0], ledger) for ledger in ledgers]
    steps = [_by_step(ledger) for ledger in ledgers]
    step = min((v.step for v in verdicts if v.step is not None), default=0)
    columns = versions(steps), versions([of_run[step] for of_run in steps])
    for run, outcome, verdict, by_step, by_probe in zip(
        setting, outcomes, verdicts, *columns, strict=True
    ):
        parts = "" if verdict.same else verdict.text.splitlines()[0]
        yield Result(
            name,
            run,
            *outcome,
            parts=parts,
            agreed=verdict.agreed,
            by_step=by_step,
            step=step,
            by_probe=by_probe,
        )


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
