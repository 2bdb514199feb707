"""Measures the parts of the experiment one after the other, and writes rows after each step.

On a GPU nobody may look on, and a run may be cut off. What raises is a row that says so, and
the others go on.
"""

import dataclasses
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from eqx_norm.determinism import fingerprint
from experiments.lab import rows as csv
from experiments.lab import timer
from experiments.lab.environment import environment
from experiments.lab.errors import UserError
from experiments.lab.experiment import Files
from experiments.lab.peers import names
from experiments.lab.timer import Program

from . import agreement, cases, compiling, networks, programs, training
from .cases import BOTH, COLD, FORWARD, IN_TORCH, INFERENCE, OWN, PARTS, Job, Problem
from .programs import How
from .rows import DIFFERS, Row, because

# Packages on which the numbers depend, though nobody imports them.
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")

# What is to be measured, and how: the row stands there where that raises.
Step = tuple[Row, Callable[[], list[Row]]]


def measure(job: Job, files: Files) -> dict[str, Any]:
    """Writes rows, and returns what they were measured with."""
    if not job.peers:
        raise UserError("--peers: none of them can run here")
    noted = {"environment": environment(*PLUGINS), "settings": dataclasses.asdict(job)}
    # So that what a run has measured until it was cut off can be shown.
    files.json.write_text(json.dumps(noted), encoding="utf-8")
    parts, rows = Parts(job), []
    for part in (part for part in PARTS if part in job.parts):
        print(f"[{time.strftime('%H:%M:%S')}] {PARTS[part]}", flush=True)
        for row, work in getattr(parts, part)():
            try:
                rows += work()
            except Exception as error:  # whatever it is, the others are to be measured
                rows.append(because(row, error))
            csv.save(files.csv(), Row, rows)
    return noted


class Parts:
    """Yields the steps of each part, by its name."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._bandwidth = math.nan  # of a copy, in bytes a millisecond

    def bits(self) -> Iterator[Step]:
        for problem in self._job.problems(self._job.for_bits):
            for name in self._job.entered(problem):
                if names.package(name) == "eqx_norm":
                    row = self._row("bits", problem, name, "")
                    yield row, partial(self._bits, row)

    def agreement(self) -> Iterator[Step]:
        for problem in self._job.compared():
            for name in self._job.entered(problem):
                row = self._row("agreement", problem, name, BOTH)
                yield row, partial(self._agreement, row)

    def training(self) -> Iterator[Step]:
        for dtype in self._job.dtypes:
            problem = training.problem(self._job.network, dtype)
            row = self._row("training", problem, "", cases.STEP)
            yield row, partial(self._training, row)

    def layer_norm(self) -> Iterator[Step]:
        return self._layers(
            "layer_norm", self._job.layer_norms(self._job.rows), (FORWARD, BOTH)
        )

    def time(self) -> Iterator[Step]:
        return self._layers("time", self._job.batch_norms(self._job.shapes), self._job.passes)

    def growth(self) -> Iterator[Step]:
        """Times this layer on ever larger arrays of f32.

        New results are, from 32 MiB on, fresh pages of the system, which take longer to get
        than the arithmetic takes. So y and dx are written over those of the call before.

        Arrays of a power of two in size, one after the other, get in each other's way: in NumPy
        a plain addition of two takes up to 3 times as long as where they are 4 KiB further
        apart. So there are powers of three as N, too: were it the layer that does not grow
        linearly, they would show it.
        """
        name, made = names.OURS, {}
        for n in self._job.growth if name in self._job.peers else ():
            problem = Problem((n, 64, 16, 16), "f32", OWN)
            make = partial(programs.program, name, problem, BOTH, How(in_place=True))
            made[self._row("growth", problem, name, BOTH)] = make
        rounds = max(1, self._job.rounds // 2)
        yield Row(self._job.device, "growth"), lambda: self._race(made, "growth", rounds)

    def residual(self) -> Iterator[Step]:
        """Counts what networks of blocks move, by the number of blocks."""
        problem = Problem(self._job.residual, "f32", OWN)
        for blocks in self._job.blocks:
            for name in self._built_in_equinox():
                row = self._row("residual", problem, name, f"{blocks} blocks")
                yield row, partial(compiling.moved, row, blocks)

    def compile(self) -> Iterator[Step]:
        """Measures temporaries, and the time to compile a layer, in the first dtype."""
        for problem in self._job.batch_norms(self._job.shapes):
            if problem.shape in self._job.few and problem.dtype == self._job.dtypes[0]:
                row = self._row("compile", problem, "", BOTH)
                entered = [n for n in self._job.entered(problem) if n not in IN_TORCH]
                yield row, partial(self._compiled, row, compiling.layer, entered)

    def networks(self) -> Iterator[Step]:
        """Compiles whole networks, of Equinox's modules."""
        for name, (_, shape) in networks.NETWORKS.items():
            row = self._row("networks", Problem(shape, "f32", OWN), "", name)
            entered = self._built_in_equinox()
            yield row, partial(self._compiled, row, compiling.network, entered)

    def _built_in_equinox(self) -> list[str]:
        built = (names.OURS_SEPARATE, names.EQUINOX_BATCH)
        return [name for name in built if name in self._job.peers]

    def _layers(
        self, part: str, problems: list[Problem], passes: tuple[str, ...]
    ) -> Iterator[Step]:
        if self._job.copied and math.isnan(self._bandwidth):
            size = self._job.copied
            row = Row(self._job.device, "copy", (size // 4,), "f32", "", "JAX, copy", "copy")
            yield row, partial(self._copy, row, size)
        for problem, pass_ in itertools.product(problems, passes):
            row = self._row(part, problem, "", pass_)
            yield row, partial(self._layer, row)

    def _row(self, part: str, problem: Problem, peer: str, program: str) -> Row:
        return Row(self._job.device, part, *problem, peer, program)

    def _bits(self, row: Row) -> list[Row]:
        """Counts runs with other bits than the first: of y and memory, and of the gradients."""
        how, runs = How(as_on_a_gpu=self._job.as_on_a_gpu), self._job.runs
        run = programs.program(row.peer, row.problem, BOTH, how).call
        counts = zip(("forward", "backward"), differing(run, runs), strict=True)
        return [replace(row, program=p, differing=n, calls=runs) for p, n in counts]

    def _agreement(self, row: Row) -> list[Row]:
        """Measures the largest deviation of a peer from the same in float64."""
        case = agreement.case(row.problem, programs.given_shape(row.peer, row.problem))
        how = How(as_on_a_gpu=self._job.as_on_a_gpu)
        answer = _made_by(row.peer).answer(row.peer, row.problem, case.given, how)
        deviation = case.deviation(answer)
        agrees = deviation <= agreement.TOLERANCE[row.dtype]
        return [replace(row, deviation=deviation, note="" if agrees else DIFFERS)]

    def _training(self, row: Row) -> list[Row]:
        entered = [name for name in self._job.entered(row.problem) if name not in IN_TORCH]
        with ThreadPoolExecutor() as pool:  # nothing is compiled while something is timed
            made = {
                replace(row, peer=name): pool.submit(
                    training.program, name, self._job.network, row.dtype
                ).result
                for name in (*entered, cases.NO_NORM)
            }
        return self._race(made, f"{row.program}, {row.dtype}")

    def _copy(self, row: Row, size: int) -> list[Row]:
        """Measures the bandwidth of a copy."""
        (row,) = self._race({row: partial(programs.copy, size)}, "copy")
        self._bandwidth = 2 * size / row.median
        return [row]

    def _layer(self, row: Row) -> list[Row]:
        """Times all peers on one array, and what they are measured by."""
        gc.collect()  # what was timed before, and takes memory
        problem, pass_, on_a_gpu = row.problem, row.program, self._job.as_on_a_gpu
        instances = min(-(-cases.ONCE_IN // problem.bytes), self._job.most_instances)
        entered, how = self._job.entered(problem, pass_), How(instances, on_a_gpu, on_a_gpu)
        if on_a_gpu:  # several at once; what fails to compile raises again below
            with ThreadPoolExecutor() as pool:
                for name in set(entered) - set(IN_TORCH):
                    pool.submit(programs.built, name, problem, pass_, how)
        if problem.layout == OWN and pass_ != INFERENCE:
            entered += programs.ROOFLINE
        made = {
            replace(row, peer=name): partial(_made_by(name).program, name, problem, pass_, how)
            for name in entered
        }
        rounds = self._job.rounds_of(problem)
        rows = self._race(made, f"{row.part}, {row.place}", rounds, self._job.caches)
        least = cases.LEAST.get((problem.rows, pass_), math.nan) * problem.bytes
        return [replace(row, share=least / self._bandwidth / row.median) for row in rows]

    def _race(
        self,
        made: Mapping[Row, Callable[[], Program]],
        title: str,
        rounds: int = 0,
        caches: tuple[str, ...] = ("",),
    ) -> list[Row]:
        """Returns the rows with their times, or with why there are none."""
        found: list[Row] = []
        entered: dict[Row, Program] = {}

        def failed(row: Row, error: Exception) -> None:
            found.append(because(row, error))

        for row, make in made.items():
            try:
                entered[row] = make()
            except Exception as error:  # whatever it is, the others are to be measured
                failed(row, error)
        for cache in caches:
            times = timer.interleave(
                entered,
                rounds or self._job.rounds,
                least=self._job.least,
                wait_for_each=not self._job.as_on_a_gpu,
                cold=cache == COLD,
                failed=failed,
                title=title,
            )
            found.extend(
                self._timed(replace(row, cache=cache), entered[row].instances, taken)
                for row, taken in times.items()
            )
        return found

    def _timed(self, row: Row, instances: int, taken: timer.Times) -> Row:
        low, median, high = taken.percentiles(self._job.spread[0], 50, self._job.spread[1])
        return replace(
            row,
            median=median,
            low=low,
            high=high,
            host=1e3 * statistics.median(taken.host.tolist()),
            calls=taken.calls,
            instances=instances,
        )

    def _compiled(
        self, row: Row, made: Callable[[str, Row], compiling.Make], entered: list[str]
    ) -> list[Row]:
        makes = {name: made(name, row) for name in entered}
        return compiling.in_turns(row, makes, self._job.compilations)


def _made_by(name: str) -> Any:
    """Returns the module that makes programs of that name."""
    if name in IN_TORCH:
        from . import in_torch

        return in_torch
    return programs


def differing(run: Callable[[], Any], runs: int) -> list[float]:
    """Returns how many of so many runs gave other bits than the first, forward and backward."""

    @jax.jit
    def prints(y: Any, memory: Any, gradients: Any) -> Array:
        return jnp.stack([fingerprint((y, memory)), fingerprint(gradients)])

    found = np.array([prints(*run()[0]) for _ in range(runs)])
    return (found != found[0]).any(-1).sum(0).tolist()
