"""The measurements, part by part.

On a GPU nobody may look on, and a run may be cut off: there is a line for each step, and
results are written after each. What raises is a row that says so, and the others go on.
"""

import dataclasses
import faulthandler
import functools
import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from importlib.metadata import distributions
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from experiments.lab import rows as csv
from experiments.lab import timer
from experiments.lab.environment import environment
from experiments.lab.experiment import Files
from experiments.lab.peers import Layer, names
from experiments.lab.timer import Program

from . import agreement, programs, roofline, training
from .cases import (
    AGREEMENT,
    BITS,
    BOTH,
    COMPILE,
    COPY,
    DTYPES,
    FORWARD,
    GROWTH,
    IN_TORCH,
    LAYER_NORM,
    NO_NORM,
    ONCE_IN,
    OWN,
    PARTS,
    PASSES,
    STACK,
    STEP,
    TIME,
    TRAINING,
    Job,
    Pass,
    Problem,
    shape_name,
)
from .programs import How
from .rows import DIFFERS, FAILED, Row, because, replaced, timed

MOST_THREADS = 16
# No step on a GPU takes so long, in seconds, unless something hangs. (A kernel that waits for
# itself would hang for ever.)
LONGEST = 300
# Packages on which the numbers depend, whether they are imported or not.
NOTED = ("flax", "optax", "jax-cuda", "nvidia-cudnn", "torch", "triton")


def measure(job: Job, files: Files) -> dict[str, Any]:
    """Writes rows, and returns what they were measured with.

    Rows from before are kept if they are of the same environment, and of a job that differs in
    parts and dtypes alone.
    """
    installed = {(found.metadata["Name"] or "").lower() for found in distributions()}
    packages = sorted(name for name in installed if name.startswith(NOTED))
    noted = {"environment": environment(*packages), "settings": _settings(job)}
    old, seconds = _earlier(files, noted)
    new: list[Row] = []

    def add(rows: Sequence[Row]) -> None:
        new.extend(rows)
        for row in rows:
            if row.note.startswith(FAILED):
                print(f"{row.peer}, {row.part} {row.place}: {row.note}", flush=True)
        csv.save(files.csv(), Row, replaced(old, new))

    # At the start as well, so that a run that was cut off can be added to.
    files.json.write_text(json.dumps({**noted, "seconds of parts": seconds}), encoding="utf-8")
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:
        work = _Work(job, pool)
        if job.copied and {LAYER_NORM, TIME} & set(job.parts):
            add(work.copies())
        for part in (part for part in PARTS if part in job.parts):
            started = time.perf_counter()
            try:
                for rows in work.part(part):
                    add(rows)
            except Exception as error:  # whatever it is, the other parts are to be measured
                traceback.print_exc()
                add([because(Row(job.device, part, peer="all"), error)])
            seconds[part] = round(time.perf_counter() - started, 1)
    faulthandler.cancel_dump_traceback_later()
    return {**noted, "seconds of parts": seconds}


def _settings(job: Job) -> dict[str, Any]:
    settings = dataclasses.asdict(job)
    del settings["parts"], settings["dtypes"]
    return json.loads(json.dumps(settings))


def _earlier(files: Files, noted: dict[str, Any]) -> tuple[list[Row], dict[str, float]]:
    """Returns what was measured before of the same job in the same environment."""
    if not (files.csv().exists() and files.json.exists()):
        return [], {}
    written = json.loads(files.json.read_text(encoding="utf-8"))
    if {name: written.get(name) for name in noted} != noted:
        print(f"{files.csv()} was measured with something else, and is replaced.")
        return [], {}
    return csv.load(files.csv(), Row), written["seconds of parts"]


class _Work:
    """The parts of a job; each yields the rows of one step after the other."""

    def __init__(self, job: Job, pool: Executor) -> None:
        self._job, self._pool = job, pool
        self._torch = "cuda" if job.device == "gpu" else "cpu"
        self._bandwidth = float("nan")  # of a copy, in bytes a millisecond

    def part(self, part: str) -> Iterator[list[Row]]:
        job = self._job
        match part:
            case "bits":
                return self._bits()
            case "agreement":
                return self._agreement()
            case "training":
                return self._training()
            case "layer_norm":
                return self._layers(part, job.layer_norms(job.rows))
            case "time":
                return self._layers(part, job.batch_norms(job.shapes))
            case "growth":
                return self._growth()
            case "compile":
                return self._compile()
        return self._stack()

    def copies(self) -> list[Row]:
        """Measures the bandwidth of a copy: the fastest of several counts."""
        size = self._job.copied
        self._say("copies")
        made: dict[str, Callable[[], Program]] = {
            "JAX, copy": lambda: roofline.copy_in_place(jnp.copy, size),
            "JAX, x + 1": lambda: roofline.copy_in_place(lambda x: x + 1, size),
        }
        if names.TORCH in self._job.peers:
            made["PyTorch, copy"] = lambda: _in_torch().copy(size, self._torch)
        row = Row(self._job.device, COPY, (size // 4,), "f32", program=COPY)
        rows = self._race(
            {dataclasses.replace(row, peer=name): make for name, make in made.items()}, COPY
        )
        speeds = [2 * size / row.median for row in rows if not row.failed]
        self._bandwidth = max(speeds, default=self._bandwidth)
        return rows

    def _say(self, text: str) -> None:
        """On a GPU a step that hangs ends the process, and says where."""
        if self._job.as_on_a_gpu:
            print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
        if self._job.device == "gpu":
            faulthandler.dump_traceback_later(LONGEST, exit=True)

    def _row(self, part: str, problem: Problem, peer: str, program: str) -> Row:
        shape, dtype, layout = problem
        return Row(self._job.device, part, shape, dtype, layout, peer, program)

    def _race(
        self, made: Mapping[Row, Callable[[], Program]], title: str, rounds: int = 0
    ) -> list[Row]:
        """Returns the rows with their times, or with why there are none."""
        found: dict[Row, Row] = {}
        entered: dict[Row, Program] = {}
        for row, make in made.items():
            try:
                entered[row] = make()
            except Exception as error:  # whatever it is, the others are to be measured
                found[row] = because(row, error)
        times = timer.interleave(
            entered,
            rounds or self._job.rounds,
            least=self._job.least,
            failed=lambda row, error: found.update({row: because(row, error)}),
            title=title,
        )
        for row, taken in times.items():
            program = entered[row]
            found[row] = timed(row, taken, program.instances, self._job.spread, program.note)
        return [found[row] for row in made]

    # Times

    def _layers(self, part: str, problems: list[Problem]) -> Iterator[list[Row]]:
        for stage in self._stages(problems):
            for problem in stage:
                self._say(f"timing {problem}")
                rows = []
                for pass_ in PASSES:
                    rows += self._layer(part, problem, pass_)
                    gc.collect()  # what was timed, before the next takes memory
                    if set(IN_TORCH) & set(self._job.peers):
                        _in_torch().forget()
                yield rows

    def _layer(self, part: str, problem: Problem, pass_: Pass) -> list[Row]:
        """Times all peers on one array, and what they are measured by."""
        instances = self._instances(problem)
        how = How(instances, self._job.as_on_a_gpu, self._job.as_on_a_gpu)
        made: dict[Row, Callable[[], Program]] = {}
        for name in self._job.entered(problem, pass_):
            if name in IN_TORCH:
                make = functools.partial(
                    _in_torch().program, name, problem, pass_, instances, self._torch
                )
            else:
                make = functools.partial(programs.program, name, problem, pass_, how)
            made[self._row(part, problem, name, pass_)] = make
        if problem.layout == OWN:
            parts = self._row(part, problem, roofline.PARTS, pass_)
            made[parts] = lambda: roofline.sum_of_parts(problem, pass_)
            # A copy is what it is, whatever is done with x.
            copy = self._row(part, problem, roofline.MEMORY_COPY, pass_)
            made[copy] = lambda: roofline.memory_copy(problem)
        least = problem.least_bytes(pass_) / self._bandwidth
        return [
            dataclasses.replace(row, share=least / row.median)
            for row in self._race(made, f"{part}, {problem}")
        ]

    def _instances(self, problem: Problem) -> int:
        return min(-(-ONCE_IN // problem.bytes), self._job.most_instances)

    def _stages(self, problems: Sequence[Problem]) -> Iterator[list[Problem]]:
        """Yields what is compiled together: nothing should be while something is timed.

        It is not all of it, so that there are results early. On a CPU each is compiled as it is
        first called.
        """
        if not self._job.as_on_a_gpu:
            yield from ([problem] for problem in problems)
            return
        stages: dict[tuple[str, int], list[Problem]] = {}
        for problem in problems:
            stages.setdefault((problem.dtype, problem.shape[0]), []).append(problem)
        for stage in stages.values():
            wanted = [
                (name, problem, pass_, How(self._instances(problem), True, True))
                for problem in stage
                for pass_ in PASSES
                for name in self._job.entered(problem, pass_)
                if name not in IN_TORCH
            ]
            self._say(f"compiling {len(wanted)} programs, {stage[0].dtype}")
            for i, _ in enumerate(self._pool.map(_compiles, wanted), 1):
                if i % 20 == 0:
                    self._say(f"{i} of {len(wanted)}")
            yield stage

    def _growth(self) -> Iterator[list[Row]]:
        """Times this layer on ever larger arrays of f32.

        The memory has to be the program's, or else it is the allocator that is measured.
        Results that are new arrays at every call are, from 32 MiB on, fresh pages: glibc
        returns larger ones to the system, and to get pages takes longer than the arithmetic. So
        y and dx are written over those of the call before. x and dy themselves are not. To put
        y where x is, XLA would first copy x, which the backward pass needs; and after some
        calls such an x is zero but for a few large values.

        What is left is where the arrays lie. With a power of two in size, one after the other
        in kept memory, they are apart by just that and a few cache lines, and get in each
        other's way: a plain addition of two such arrays, in NumPy, takes up to 3 times as long
        as where they are 4 KiB further apart. So there are powers of three as N, too: were it
        the layer that does not grow linearly, they would show it.
        """
        made = {}
        for n in self._job.growth if names.OURS in self._job.peers else ():
            problem = Problem((n, 64, 16, 16), "f32", OWN)
            row = self._row(GROWTH, problem, names.OURS, BOTH)
            made[row] = functools.partial(
                programs.program, names.OURS, problem, BOTH, How(in_place=True)
            )
        yield self._race(made, GROWTH, max(1, self._job.rounds // 2))

    def _training(self) -> Iterator[list[Row]]:
        sizes = self._job.network
        shape = training.images_shape(sizes)
        for dtype in self._job.dtypes:
            self._say(f"training step, {dtype}: compiling, then timing")
            problem = Problem(shape, dtype, "")
            entered = [n for n in self._job.entered(problem) if n not in IN_TORCH]
            linear = training.initial(sizes, DTYPES[dtype])
            made = {
                self._row(TRAINING, problem, name, STEP): self._pool.submit(
                    training.program, name, linear, sizes, dtype
                )
                for name in (*entered, NO_NORM)
            }
            for future in made.values():
                future.exception()  # waits: nothing should be compiled while something is timed
            rows = self._race(
                {row: lambda future=future: future.result()[0] for row, future in made.items()},
                f"training step, {dtype}",
            )
            for i, future in enumerate(made.values()):
                if not rows[i].failed and not np.isfinite(future.result()[1]()):
                    error = FloatingPointError("the loss is not finite")
                    rows[i] = because(list(made)[i], error)
            yield rows

    # What compiling tells

    def _compile(self) -> Iterator[list[Row]]:
        for problem in self._job.batch_norms(self._job.shapes):
            made = {
                name: programs.layer(name, problem)
                for name in self._job.entered(problem)
                if name not in IN_TORCH
            }
            yield [
                *self._compiled(COMPILE, made, problem, FORWARD, 1),
                *self._compiled(COMPILE, made, problem, BOTH, self._job.compilations),
            ]

    def _stack(self) -> Iterator[list[Row]]:
        """Compiles many blocks of a linear layer, norm and ReLU, both ways."""
        problem, depth = Problem(self._job.stack, "f32", OWN), self._job.depth
        made = {
            name: programs.stack(
                programs.layer(name, problem), depth, -1 if name == names.LINEN else 1
            )
            for name in (names.OURS, names.EQUINOX_BATCH, names.LINEN)
            if name in self._job.peers
        }
        yield self._compiled(STACK, made, problem, BOTH, self._job.compilations, depth)

    def _compiled(
        self,
        part: str,
        layers: Mapping[str, Layer],
        problem: Problem,
        pass_: Pass,
        times: int,
        depth: int = 0,
    ) -> list[Row]:
        """Compiles the layers in turns, so many times; the time to compile forward is noise."""
        taken: dict[str, list[tuple[float, int]]] = {name: [] for name in layers}
        channels = problem.shape[1]
        affine: Any = jnp.ones(channels), jnp.zeros(channels)
        affine = (affine,) * depth if depth else affine
        title = f"{part}, {shape_name(problem.shape)} {problem.dtype}"
        for _ in tqdm(range(times), desc=f"{title:>28}", leave=False, disable=None):
            for name, made in layers.items():
                x = jax.ShapeDtypeStruct(
                    programs.given_shape(name, problem), DTYPES[problem.dtype]
                )
                given = (x,) if pass_ == FORWARD else (x, x)
                function = programs.function(made, pass_)
                taken[name].append(compiled(function, (affine, made.memory, *given)))
        return [
            dataclasses.replace(
                self._row(part, problem, name, pass_),
                temporaries=several[0][1] / problem.bytes,
                compile_seconds=statistics.median(seconds for seconds, _ in several)
                if pass_ == BOTH
                else float("nan"),
            )
            for name, several in taken.items()
        ]

    # Results

    def _agreement(self) -> Iterator[list[Row]]:
        """Returns the largest deviation of each peer from the same in float64."""
        job = self._job
        batch_norms = job.batch_norms(job.shapes_to_agree or job.shapes)
        for problem in (*batch_norms, *job.layer_norms(job.rows_to_agree or job.rows)):
            self._say(f"agreement: {problem}")
            given = agreement.numbers(problem.shape)
            exact, rows = agreement.Agreement(given, problem), []
            for name in job.entered(problem):
                row = self._row(AGREEMENT, problem, name, BOTH)
                try:
                    found = exact.deviation(self._outputs(name, problem, given))
                except Exception as error:  # whatever it is, the others are to be measured
                    rows.append(because(row, error))
                else:
                    note = "" if found <= exact.tolerance else DIFFERS
                    rows.append(dataclasses.replace(row, deviation=found, note=note))
            yield rows

    def _outputs(
        self, name: str, problem: Problem, given: agreement.Numbers
    ) -> agreement.Outputs:
        if name in IN_TORCH:
            torch = _in_torch()
            made = torch.program(name, problem, BOTH, 1, self._torch, given)
            return torch.outputs(made.wait(made.call()))
        return outputs(name, problem, given, How(as_on_a_gpu=self._job.as_on_a_gpu))

    def _bits(self) -> Iterator[list[Row]]:
        """Counts runs with other bits than the first: of y and memory, and of the gradients."""
        job, how = self._job, How(as_on_a_gpu=self._job.as_on_a_gpu)
        batch_norms = job.batch_norms(job.shapes_for_bits)
        for problem in (*batch_norms, *job.layer_norms(job.rows_for_bits)):
            self._say(f"bits: {problem}")
            entered = [n for n in job.entered(problem) if names.package(n) == "eqx_norm"]
            list(self._pool.map(_compiles, ((n, problem, BOTH, how) for n in entered)))
            rows = []
            for name in entered:
                row = self._row(BITS, problem, name, "")
                try:
                    run = programs.program(name, problem, BOTH, how).call
                    counts = differing(run, job.runs)
                except Exception as error:  # whatever it is, the others are to be measured
                    rows.append(because(row, error))
                else:
                    rows += [
                        dataclasses.replace(row, program=p, differing=n, calls=job.runs)
                        for p, n in counts.items()
                    ]
            yield rows


def outputs(
    name: str, problem: Problem, given: agreement.Numbers, how: How
) -> agreement.Outputs:
    """Returns what a layer in JAX gives for these numbers."""
    call, memory, *_ = programs.built(name, problem, BOTH, how)
    x, dy = (programs.placed(name, problem, values) for values in (given.x, given.dy))
    affine = jnp.asarray(given.weight), jnp.asarray(given.bias)
    ((y, _, (slopes, dx)),) = call(affine, memory, [(x, dy)], None)
    y, dx = (programs.back(name, problem, values) for values in (y, dx))
    return agreement.Outputs(y, dx, *map(np.asarray, slopes))


def compiled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, int]:
    """Returns the seconds to trace, lower and compile, and the bytes of temporaries.

    `function` has to be a fresh one; what JAX has traced of others before is forgotten, so that
    nobody gains from the order, and what it keeps on the disk is not used.
    """
    switch = "jax_enable_compilation_cache"
    before = getattr(jax.config, switch)
    jax.clear_caches()
    jax.config.update(switch, False)
    try:
        start = time.perf_counter()
        program = jax.jit(function).lower(*arguments).compile()
        seconds = time.perf_counter() - start
    finally:
        jax.config.update(switch, before)
    analysis = program.memory_analysis()
    if analysis is None:
        raise RuntimeError(f"{jax.default_backend()} does not tell what memory programs need")
    return seconds, analysis.temp_size_in_bytes


def differing(run: Callable[[], Any], runs: int) -> dict[str, float]:
    """Returns how many of so many runs gave other bits than the first."""
    ((y, memory, gradients),) = run()
    found = []
    for _ in range(runs - 1):
        ((other_y, other_memory, other_gradients),) = run()
        forward = _differ((y, memory), (other_y, other_memory))
        found.append(jnp.stack([forward, _differ(gradients, other_gradients)]))
    forward, backward = jnp.stack(found).sum(0).tolist()
    return {"forward": float(forward), "backward": float(backward)}


@jax.jit
def _differ(one: Any, other: Any) -> Array:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jnp.stack([jnp.any(_bits_of(a) != _bits_of(b)) for a, b in pairs]).any()


def _bits_of(a: Array) -> Array:
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return a
    return jax.lax.bitcast_convert_type(a, jnp.dtype(f"uint{8 * a.dtype.itemsize}"))


def _compiles(wanted: tuple[str, Problem, Pass, How]) -> bool:
    """Returns whether the program compiles; why not, it says again where it is needed."""
    try:
        programs.built(*wanted)
    except Exception:
        return False
    return True


def _in_torch() -> Any:
    from . import in_torch

    return in_torch
