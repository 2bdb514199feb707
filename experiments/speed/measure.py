"""Runs part after part, and writes results after each step.

On a GPU nobody may look on, and a run may be cut off. What raises is a row that says so, and
the others go on.
"""

import dataclasses
import faulthandler
import json
import os
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from typing import Any

from experiments.lab import rows as csv
from experiments.lab.environment import environment
from experiments.lab.errors import UserError
from experiments.lab.experiment import Files

from .cases import PARTS, Job
from .parts import Parts
from .rows import Row, because, replaced

MOST_THREADS = 16
# Packages on which the numbers depend, whether they are imported or not.
NOTED = ("flax", "optax", "jax-cuda", "nvidia-cudnn", "torch", "triton")


def measure(job: Job, files: Files) -> dict[str, Any]:
    """Writes rows, and returns what they were measured with.

    Rows from before are kept if they are of the same environment, and of a job that differs in
    parts and dtypes alone.
    """
    if not job.peers:
        raise UserError("--peers: none of them can run here")
    installed = {(found.metadata["Name"] or "").lower() for found in distributions()}
    packages = sorted(name for name in installed if name.startswith(NOTED))
    settings = dataclasses.asdict(job)
    del settings["parts"], settings["dtypes"]
    settings = json.loads(json.dumps(settings))  # as they are read again
    noted = {"environment": environment(*packages), "settings": settings}
    old, seconds = _earlier(files, noted)
    new: list[Row] = []

    def add(rows: Sequence[Row]) -> None:
        new.extend(rows)
        for row in rows:
            if row.failed:
                print(f"{row.peer}, {row.part} {row.place}: {row.note}", flush=True)
        csv.save(files.csv(), Row, replaced(old, new))

    # At the start as well, so that a run that was cut off can be added to.
    files.json.write_text(json.dumps({**noted, "seconds of parts": seconds}), encoding="utf-8")
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:
        parts = Parts(job, pool)
        if job.copied and {"layer_norm", "time"} & set(job.parts):
            add(parts.copies())
        for part in (part for part in PARTS if part in job.parts):
            started = time.perf_counter()
            try:
                for rows in getattr(parts, part)():
                    add(rows)
            except Exception as error:  # whatever it is, the other parts are to be measured
                traceback.print_exc()
                add([because(Row(job.device, part, peer="all"), error)])
            seconds[part] = round(time.perf_counter() - started, 1)
    faulthandler.cancel_dump_traceback_later()
    return {**noted, "seconds of parts": seconds}


def _earlier(files: Files, noted: dict[str, Any]) -> tuple[list[Row], dict[str, float]]:
    """Returns what was measured before of the same job in the same environment."""
    if not (files.csv().exists() and files.json.exists()):
        return [], {}
    written = json.loads(files.json.read_text(encoding="utf-8"))
    if {name: written.get(name) for name in noted} != noted:
        print(f"{files.csv()} was measured with something else, and is replaced.")
        return [], {}
    return csv.load(files.csv(), Row), written["seconds of parts"]
