"""The measurements on a GPU, part by part. A line for each step, since nobody may look on."""

import faulthandler
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from . import (
    gpu_run_accuracy,
    gpu_run_agreement,
    gpu_run_bits,
    gpu_run_layers,
    gpu_run_rows,
    gpu_run_train,
)
from .gpu_run_contenders import EVERY, NO_NORM, OURS_BY
from .gpu_run_job import Job, Problem
from .gpu_run_programs import Noise
from .gpu_run_rows import ACCURACY, AGREEMENT, BITS, LAYER_NORM, LAYERS, TRAIN, Files, Row
from .gpu_run_torch import COMPILED, TORCH

MOST_THREADS = 16
# No step takes so long, in seconds, unless something hangs. (A kernel that waits for itself
# would hang for ever.)
LONGEST = 300


def run(
    job: Job, parts: Sequence[str], files: Files, left_out: dict[str, str], *, gpu: bool
) -> tuple[list[Row], dict[str, float]]:
    """All rows, those from before included; and the seconds that each part took."""
    old, new, seconds = files.earlier(), [], {}
    # At the start as well, so that a run that was cut short can be added to.
    files.describe(left_out, seconds)

    def add(rows: list[Row]) -> None:
        new.extend(rows)
        for row in rows:
            if row.failed:
                measured.say(f"{row.contender}, {row.part} {row.what} {row.dtype}: {row.note}")
        files.save(gpu_run_rows.replaced(old, new))

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:
        names = [name for name in EVERY if name not in left_out]
        measured = _Measured(job, names, pool, gpu)
        if {LAYER_NORM, LAYERS} & set(parts):
            add(measured.copies())
        for part in parts:
            started = time.perf_counter()
            try:
                for rows in measured.part(part):
                    add(rows)
            except Exception as error:  # whatever it is, the other parts are to be measured
                add([gpu_run_rows.because(Row(part, "", "", "", "", "all"), error)])
            seconds[part] = round(time.perf_counter() - started, 1)
            measured.say(f"{part}: {seconds[part]} s")
    faulthandler.cancel_dump_traceback_later()
    return gpu_run_rows.replaced(old, new), seconds


class _Measured:
    def __init__(self, job: Job, names: list[str], pool: Executor, gpu: bool):
        self._job, self._names, self._pool, self._gpu = job, names, pool, gpu
        self._ours = [name for name in names if name in OURS_BY.values()]
        self._torch_device = "cuda" if gpu else "cpu"
        self._bandwidth = float("nan")

    def say(self, text: str) -> None:
        """A step that hangs ends the process, and says where; what was measured before is in
        the file."""
        print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
        if self._gpu:
            faulthandler.dump_traceback_later(LONGEST, exit=True)

    def copies(self) -> list[Row]:
        self.say("copies")
        job, torch = self._job, TORCH in self._names
        rows = gpu_run_layers.copies(
            job.copied, job.rounds, job.least, self._torch_device, torch=torch
        )
        self._bandwidth = max(
            (row.value for row in rows if not row.failed), default=self._bandwidth
        )
        return rows

    def part(self, part: str) -> Iterator[list[Row]]:
        """The rows of one step after the other."""
        return {
            BITS: self._bits,
            ACCURACY: self._accuracy,
            AGREEMENT: self._agreement,
            TRAIN: self._train,
            LAYER_NORM: lambda: self._timed(LAYER_NORM, self._job.layer_norm),
            LAYERS: lambda: self._timed(LAYERS, self._job.layers),
        }[part]()

    def _bits(self) -> Iterator[list[Row]]:
        noise = Noise(self._job.bits)
        for problem in self._job.bits:
            self.say(f"bits: {problem}")
            yield gpu_run_bits.measure(problem, self._ours, noise, self._job.runs, self._pool)

    def _accuracy(self) -> Iterator[list[Row]]:
        for case in self._job.cases:
            self.say(f"accuracy: {case.name}")
            yield gpu_run_accuracy.measure(case, self._ours, self._pool)

    def _agreement(self) -> Iterator[list[Row]]:
        for problem in self._job.agreement:
            self.say(f"agreement: {problem}")
            yield gpu_run_agreement.measure(problem, self._names, self._torch_device)

    def _train(self) -> Iterator[list[Row]]:
        job, torch = self._job, (TORCH, COMPILED)
        names = [*(name for name in self._names if name not in torch), NO_NORM]
        for dtype in job.dtypes:
            self.say(f"training step, {dtype}: compiling, then timing")
            yield gpu_run_train.measure(
                names, job.network, dtype, job.rounds, job.least, self._pool
            )

    def _timed(self, part: str, problems: list[Problem]) -> Iterator[list[Row]]:
        setting = gpu_run_layers.Setting(
            part,
            tuple(self._names),
            self._job.rounds,
            self._job.least,
            self._job.most_instances,
            self._bandwidth,
            self._torch_device,
        )
        return gpu_run_layers.measure(problems, setting, self._pool, self.say)
