"""Several processes: the same statistics in each, checkpoints, and a process that is killed.

    python -m experiments.distributed                  the whole job: 2 and 4 processes
    python -m experiments.distributed --processes 3    3 of them
    python -m experiments.distributed --quick          2, under 30 seconds

Each process trains the stability experiment's network on its part of each batch of MNIST, under
`jax.distributed`, on one machine and its CPU: `experiments.distributed.train`, which any other
launcher can start as well. Each run is compared with one process that has as many devices. In
the end one of its processes is killed, and fewer of them go on from a checkpoint of half-way.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from experiments.lab import rows
from experiments.lab.claims import judge, verdicts_table
from experiments.lab.experiment import Experiment, Files, Report, number_from
from experiments.lab.tables import listing

from . import launch
from .claims import CLAIMS
from .launch import ONE, RESTORED, SEVERAL, Process
from .train import HEARTBEAT, SEED


@dataclass(frozen=True)
class Job:
    """Says what to run. The defaults are the whole job."""

    processes: tuple[int, ...] = (2, 4)
    # Few: later on a rounding error decides the sign of a ReLU's input or which of two pixels a
    # pooling takes, and runs part by 1e-4, whatever the layer does (seen after 20 steps).
    steps: int = 10
    flags: str = ""  # XLA's


QUICK = Job(
    processes=(2,),
    steps=4,
    # Four steps take less time than to make them fast.
    flags="--xla_backend_optimization_level=0",
)


def measure(job: Job, files: Files) -> dict[str, Any]:
    found: list[Process] = []
    for processes in tqdm(job.processes, unit="setting", disable=None):
        with tempfile.TemporaryDirectory() as folder:
            for run in ONE, SEVERAL, RESTORED:
                found += launch.processes(run, processes, job.steps, folder, job.flags)
    rows.save(files.csv(), Process, found, digits=9)
    return {"seed": SEED, "steps": job.steps, "heartbeat, seconds": HEARTBEAT}


COLUMNS = {
    "run": "{run}",
    "processes": "{processes}",
    "devices": "{devices}",
    "process": "{process}",
    "exit code": "{code}",
    "s after the kill": "{seconds:.1f}",
    "memory": "{memory}",
    "weights": "{weights}",
    "error": "{error:.1e}",
}


def report(files: Files) -> Report:
    found = rows.load(files.csv(), Process)
    verdicts = judge(CLAIMS, found)
    text = f"{listing(found, COLUMNS)}\n\n{verdicts_table(verdicts)}".replace(" nan ", "  -  ")
    most = max(row.processes for row in found)
    return Report(text, verdicts, ours=f"{most} processes: one memory, to the bit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        nargs="+",
        type=number_from(2),
        metavar="N",
        help="how many there are, one run after the other (default: 2 4)",
    )
    parser.add_argument(
        "--steps", type=number_from(4), metavar="N", help="training steps (default: 10)"
    )


EXPERIMENT = Experiment(
    name="distributed",
    about=__doc__,
    thread="[many devices](docs/devices.md): several processes",
    whole=Job(),
    quick=QUICK,
    measure=measure,
    report=report,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
