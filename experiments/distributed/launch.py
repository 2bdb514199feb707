"""Starts the processes of a run on this machine, and tells how each of them ended."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .train import CHECKPOINT, Outcome, Run, weights_of

ROOT = Path(__file__).parents[2]
ONE = "one process"
SEVERAL = "several"
RESTORED = "restored"
# A run that takes longer hangs.
LIMIT = 300


class Process(NamedTuple):
    """Holds how one process of a run ended. All but the last have one device each."""

    run: str
    processes: int
    devices: int  # of the run
    process: int
    code: int  # the negative signal where it was killed
    seconds: (
        float  # from the end of the process that is killed after the last step to this one's
    )
    loss: float  # that of the last step
    first_memory: str
    memory: str
    weights: str
    error: float  # of the weights, to those of one process, in units of the largest


def processes(
    name: str, devices: int, steps: int, folder: str, flags: str = ""
) -> list[Process]:
    """Runs on so many devices; the runs of one folder are compared, and share a checkpoint.

    `flags` are XLA's.
    """
    # What was killed goes on in fewer processes, of more devices each.
    count = {ONE: 1, RESTORED: 1 if devices % 2 else devices // 2}.get(name, devices)
    of_run = Path(folder, name)
    of_run.mkdir()
    run = Run(
        folder=os.fspath(of_run),
        steps=steps,
        saved_after=steps // 2,
        restored=name == RESTORED,
        killed=name == SEVERAL,
        processes=count,
        coordinator=f"localhost:{_free_port()}",
    )
    if name == RESTORED:
        shutil.copytree(Path(folder, SEVERAL, CHECKPOINT), of_run / CHECKPOINT)
    started = [
        _start(dataclasses.replace(run, process=process), devices // count, flags)
        for process in range(count)
    ]
    ended = _wait(started)
    found = []
    for process, child in enumerate(started):
        output, errors = child.communicate()
        code = child.returncode
        if not output or (code and not run.killed):
            raise RuntimeError(f"{name}, process {process}, ended with {code}:\n{errors}")
        outcome = _outcome(output)
        found.append(
            Process(
                name,
                count,
                devices,
                process,
                code,
                ended[process] - ended[-1] if run.killed else np.nan,
                outcome.losses[-1],
                outcome.first_memory,
                outcome.memory,
                outcome.weights,
                _error(run.folder, os.fspath(Path(folder, ONE))),
            )
        )
    return found


def _start(run: Run, devices: int, flags: str) -> subprocess.Popen[str]:
    flags += f" --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.distributed.train", json.dumps(vars(run))],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait(started: Sequence[subprocess.Popen[str]]) -> list[float]:
    """Returns when each process ended; kills those that have not after `LIMIT` seconds."""
    ended: dict[int, float] = {}
    begun = time.monotonic()
    while len(ended) < len(started):
        for i, child in enumerate(started):
            if i not in ended and child.poll() is not None:
                ended[i] = time.monotonic()
            if time.monotonic() - begun > LIMIT:
                child.kill()
        time.sleep(0.02)
    return [ended[i] for i in range(len(started))]


def _outcome(output: str) -> Outcome:
    """Returns what was printed last; before it come Gloo's own lines."""
    return Outcome(**json.loads(output.splitlines()[-1]))


def _error(folder: str, reference: str) -> float:
    with np.load(weights_of(folder)) as ours, np.load(weights_of(reference)) as right:
        return max(
            float(np.abs(ours[name] - right[name]).max() / np.abs(right[name]).max())
            for name in right
        )


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        return bound.getsockname()[1]
