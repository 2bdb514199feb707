"""Judges what is claimed of several processes."""

import math
from collections.abc import Callable, Sequence

from experiments.lab.claims import Claim, NotMeasured, worst
from experiments.lab.rows import by

from .launch import ONE, RESTORED, SEVERAL, Process
from .train import HEARTBEAT

# Beyond the time after which a process is missed: until it is asked for, and the error is told.
MARGIN = 5
BOUND = 1e-5


def _of(found: Sequence[Process], *runs: str) -> list[Process]:
    rows = [row for row in found if row.run in runs]
    if not rows:
        raise NotMeasured
    return rows


def _one_memory(found: Sequence[Process]) -> tuple[str, bool]:
    runs = by(_of(found, SEVERAL), lambda row: row.processes)
    alike = [
        len({(row.memory, row.weights) for row in of_run}) == 1 for of_run in runs.values()
    ]
    return f"{sum(alike)} of {len(alike)} runs", all(alike)


def _as_in_one(found: Sequence[Process]) -> tuple[str, bool]:
    runs = by(_of(found, ONE, SEVERAL), lambda row: row.devices)
    alike = [len({row.first_memory for row in of_run}) == 1 for of_run in runs.values()]
    return f"{sum(alike)} of {len(alike)} numbers of devices", all(alike)


def _weights(run: str) -> Callable[[Sequence[Process]], tuple[str, bool]]:
    def judge(found: Sequence[Process]) -> tuple[str, bool]:
        error, row = worst(_of(found, run), lambda row: row.error)
        return f"{error:.1e} ({row.devices} devices)", error <= BOUND

    return judge


def _killed(found: Sequence[Process]) -> tuple[str, bool]:
    others = [row for row in _of(found, SEVERAL) if row.code != -9]
    late = max((row.seconds for row in others), default=math.inf)
    wrong = [row for row in others if row.code == 0]
    return f"after {late:.1f} s", not wrong and late <= HEARTBEAT + MARGIN


CLAIMS = [
    Claim("1. all processes have the same weights and memory, to the bit", _one_memory),
    Claim("2. after a step the memory of one process with as many devices", _as_in_one),
    Claim(f"3. the weights of one process with as many devices, to {BOUND}", _weights(SEVERAL)),
    Claim(
        f"4. where one is killed, the others end with an error in {HEARTBEAT + MARGIN} s",
        _killed,
    ),
    Claim(
        f"5. restored in fewer processes, the weights of a whole run, to {BOUND}",
        _weights(RESTORED),
    ),
]
