"""Measures the parts of the experiment, one step after the other."""

import concurrent.futures
import faulthandler
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from experiments.lab import timer
from experiments.lab.exact import Batch
from experiments.lab.peers import Layer, names
from experiments.lab.timer import Program

from . import agreement, programs, roofline, training
from .cases import (
    BOTH,
    DTYPES,
    FORWARD,
    IN_TORCH,
    NO_NORM,
    ONCE_IN,
    OWN,
    PASSES,
    STEP,
    Job,
    Problem,
    shape_name,
)
from .programs import How
from .rows import DIFFERS, Row, because, timed

# No step on a GPU takes so long, in seconds, unless something hangs. (A kernel that waits for
# itself would hang for ever.)
LONGEST = 300


class Parts:
    """Measures the parts by name; each yields the rows of one step after the other."""

    def __init__(self, job: Job, pool: Executor) -> None:
        self._job, self._pool = job, pool
        self._bandwidth = math.nan  # of a copy, in bytes a millisecond

    def bits(self) -> Iterator[list[Row]]:
        """Counts runs with other bits than the first: of y and memory, and of the gradients."""
        job, how = self._job, How(as_on_a_gpu=self._job.as_on_a_gpu)

        def count(row: Row) -> list[Row]:
            run = programs.program(row.peer, row.problem, BOTH, how).call
            counts = differing(run, job.runs)
            return [replace(row, program=p, differing=n, calls=job.runs) for p, n in counts]

        for problem in job.problems(job.shapes_for_bits, job.rows_for_bits):
            self._say(f"bits: {problem}")
            entered = [n for n in job.entered(problem) if names.package(n) == "eqx_norm"]
            self._compile_ahead((name, problem, BOTH, how) for name in entered)
            yield _attempt((self._row("bits", problem, n, "") for n in entered), count)

    def agreement(self) -> Iterator[list[Row]]:
        """Measures the largest deviation of each peer from the same in float64."""
        job, how = self._job, How(as_on_a_gpu=self._job.as_on_a_gpu)

        def compare(given: Batch, exact: agreement.Agreement, row: Row) -> list[Row]:
            found = _made_by(row.peer).answer(row.peer, row.problem, given, how)
            deviation = exact.deviation(found)
            note = "" if deviation <= exact.tolerance else DIFFERS
            return [replace(row, deviation=deviation, note=note)]

        shapes, rows = job.shapes_to_agree or job.shapes, job.rows_to_agree or job.rows
        for problem in job.problems(shapes, rows):
            self._say(f"agreement: {problem}")
            given = agreement.numbers(problem)
            exact = agreement.Agreement(given, problem)
            entered = (self._row("agreement", problem, n, BOTH) for n in job.entered(problem))
            yield _attempt(entered, partial(compare, given, exact))

    def training(self) -> Iterator[list[Row]]:
        sizes = self._job.network
        for dtype in self._job.dtypes:
            self._say(f"training step, {dtype}: compiling, then timing")
            problem = Problem(training.images_shape(sizes), dtype, "")
            linear = training.initial(sizes, DTYPES[dtype])
            made = {
                self._row("training", problem, name, STEP): self._pool.submit(
                    training.program, name, linear, sizes, dtype
                )
                for name in (*self._job.entered(problem), NO_NORM)
                if name not in IN_TORCH
            }
            # Nothing should be compiled while something is timed.
            concurrent.futures.wait(made.values())
            rows = self._race(
                {row: future.result for row, future in made.items()}, f"training step, {dtype}"
            )
            for i, future in enumerate(made.values()):
                if rows[i].calls and not np.isfinite(future.result().call()):
                    rows[i] = because(rows[i], FloatingPointError("the loss is not finite"))
            yield rows

    def layer_norm(self) -> Iterator[list[Row]]:
        return self._layers("layer_norm", self._job.layer_norms(self._job.rows))

    def time(self) -> Iterator[list[Row]]:
        return self._layers("time", self._job.batch_norms(self._job.shapes))

    def growth(self) -> Iterator[list[Row]]:
        """Times this layer on ever larger arrays of f32.

        Results that are new arrays at every call are, from 32 MiB on, fresh pages of the
        system, and to get these takes longer than the arithmetic. So y and dx are written over
        those of the call before. x and dy are not: XLA would first copy x, which the backward
        pass needs, and after some calls it is zero but for a few large values.

        What is left is where the arrays lie. With a power of two in size, one after the other
        in kept memory, they get in each other's way: a plain addition of two, in NumPy, takes
        up to 3 times as long as where they are 4 KiB further apart. So there are powers of
        three as N, too: were it the layer that does not grow linearly, they would show it.
        """
        name, made = names.OURS, {}
        for n in self._job.growth if name in self._job.peers else ():
            problem = Problem((n, 64, 16, 16), "f32", OWN)
            make = partial(programs.program, name, problem, BOTH, How(in_place=True))
            made[self._row("growth", problem, name, BOTH)] = make
        yield self._race(made, "growth", max(1, self._job.rounds // 2))

    def compile(self) -> Iterator[list[Row]]:
        """Measures temporaries, and the time to compile."""
        for problem in self._job.batch_norms(self._job.shapes):
            entered = [n for n in self._job.entered(problem) if n not in IN_TORCH]
            made = {name: programs.layer(name, problem) for name in entered}
            yield self._compiled("compile", made, problem, FORWARD, 1)
            yield self._compiled("compile", made, problem, BOTH, self._job.compilations)

    def stack(self) -> Iterator[list[Row]]:
        """Compiles many blocks of a linear layer, norm and ReLU, both ways."""
        problem, depth = Problem(self._job.stack, "f32", OWN), self._job.depth
        made = {
            name: programs.stack(programs.layer(name, problem), depth, axis)
            for name, axis in ((names.OURS, 1), (names.EQUINOX_BATCH, 1), (names.LINEN, -1))
            if name in self._job.peers
        }
        yield self._compiled("stack", made, problem, BOTH, self._job.compilations, depth)

    def copies(self) -> list[Row]:
        """Measures the bandwidth of a copy: the fastest of several counts."""
        size = self._job.copied
        self._say("copies")
        made: dict[str, Callable[[], Program]] = {
            "JAX, copy": lambda: roofline.copy_in_place(jnp.copy, size),
            "JAX, x + 1": lambda: roofline.copy_in_place(lambda x: x + 1, size),
        }
        if names.TORCH in self._job.peers:
            made["PyTorch, copy"] = lambda: _made_by(names.TORCH).copy(size)
        row = Row(self._job.device, "copy", (size // 4,), "f32", program="copy")
        rows = self._race({replace(row, peer=n): make for n, make in made.items()}, "copy")
        speeds = [2 * size / row.median for row in rows if not row.failed]
        self._bandwidth = max(speeds, default=self._bandwidth)
        return rows

    def _layers(self, part: str, problems: list[Problem]) -> Iterator[list[Row]]:
        for _, together in itertools.groupby(problems, lambda p: (p.dtype, p.shape[0])):
            stage = list(together)  # not all of them, so that there are results early
            self._compile_ahead(
                (name, problem, pass_, self._how(problem))
                for problem, pass_ in itertools.product(stage, PASSES)
                for name in self._job.entered(problem, pass_)
                if name not in IN_TORCH
            )
            for problem, pass_ in itertools.product(stage, PASSES):
                self._say(f"timing {problem}, {pass_}")
                yield self._layer(part, problem, pass_)
                gc.collect()  # what was timed, before the next takes memory
                if set(IN_TORCH) & set(self._job.peers):
                    _made_by(names.TORCH).forget()

    def _layer(self, part: str, problem: Problem, pass_: str) -> list[Row]:
        """Times all peers on one array, and what they are measured by."""
        entered = self._job.entered(problem, pass_)
        if problem.layout == OWN:
            entered += roofline.NAMES
        how = self._how(problem)
        made = {
            self._row(part, problem, name, pass_): partial(
                _made_by(name).program, name, problem, pass_, how
            )
            for name in entered
        }
        least = problem.least_bytes(pass_) / self._bandwidth
        found = self._race(made, f"{part}, {problem}")
        return [replace(row, share=least / row.median) for row in found]

    def _how(self, problem: Problem) -> How:
        on_a_gpu = self._job.as_on_a_gpu
        instances = min(-(-ONCE_IN // problem.bytes), self._job.most_instances)
        return How(instances, in_place=on_a_gpu, as_on_a_gpu=on_a_gpu)

    def _compile_ahead(self, wanted: Iterable[tuple[str, Problem, str, How]]) -> None:
        """Compiles several programs at once: nothing should be, while something is timed.

        On a CPU each is compiled as it is first called.
        """
        if self._job.as_on_a_gpu:
            for i, _ in enumerate(self._pool.map(_compiles, wanted), 1):
                if i % 20 == 0:
                    self._say(f"{i} programs are compiled")

    def _race(
        self, made: Mapping[Row, Callable[[], Program]], title: str, rounds: int = 0
    ) -> list[Row]:
        """Returns the rows with their times, or with why there are none."""
        found: dict[Row, Row] = {}
        entered: dict[Row, Program] = {}

        def failed(row: Row, error: Exception) -> None:
            found[row] = because(row, error)

        for row, make in made.items():
            try:
                entered[row] = make()
            except Exception as error:  # whatever it is, the others are to be measured
                failed(row, error)
        times = timer.interleave(
            entered,
            rounds or self._job.rounds,
            least=self._job.least,
            wait_for_each=not self._job.as_on_a_gpu,
            failed=failed,
            title=title,
        )
        for row, taken in times.items():
            found[row] = timed(row, taken, entered[row], self._job.spread)
        return [found[row] for row in made]

    def _compiled(
        self,
        part: str,
        layers: Mapping[str, Layer],
        problem: Problem,
        pass_: str,
        times: int,
        depth: int = 0,
    ) -> list[Row]:
        """Compiles the layers in turns, so many times; the median counts."""
        taken: dict[str, list[tuple[float, int]]] = {name: [] for name in layers}
        affine: Any = jnp.ones(problem.shape[1]), jnp.zeros(problem.shape[1])
        affine = (affine,) * depth if depth else affine
        title = f"{part}, {shape_name(problem.shape)} {problem.dtype}"
        for _ in tqdm(range(times), desc=f"{title:>28}", leave=False, disable=None):
            for name, made in layers.items():
                shape = programs.given_shape(name, problem)
                x = jax.ShapeDtypeStruct(shape, DTYPES[problem.dtype])
                given = (x,) if pass_ == FORWARD else (x, x)
                function = programs.function(made, pass_)
                taken[name].append(compiled(function, (affine, made.memory, *given)))
        return [
            replace(
                self._row(part, problem, name, pass_),
                temporaries=several[0][1] / problem.bytes,
                compile_seconds=statistics.median(seconds for seconds, _ in several),
            )
            for name, several in taken.items()
        ]

    def _row(self, part: str, problem: Problem, peer: str, program: str) -> Row:
        return Row(self._job.device, part, *problem, peer, program)

    def _say(self, text: str) -> None:
        """Prints a line, as nobody may look on; a step that hangs ends the process."""
        if self._job.as_on_a_gpu:
            print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
        if self._job.device == "gpu":
            faulthandler.dump_traceback_later(LONGEST, exit=True)


def _attempt(rows: Iterable[Row], work: Callable[[Row], list[Row]]) -> list[Row]:
    """Returns what the work makes of each row, or the row with why there is nothing."""
    found = []
    for row in rows:
        try:
            found += work(row)
        except Exception as error:  # whatever it is, the others are to be measured
            found.append(because(row, error))
    return found


def _made_by(name: str) -> Any:
    """Returns the module that makes programs of that name."""
    if name in IN_TORCH:
        from . import in_torch

        return in_torch
    return roofline if name in roofline.NAMES else programs


def _compiles(wanted: tuple[str, Problem, str, How]) -> bool:
    """Returns whether the program compiles; why not, it says again where it is needed."""
    try:
        programs.built(*wanted)
    except Exception:
        return False
    return True


def compiled(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[float, int]:
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


def differing(run: Callable[[], Any], runs: int) -> list[tuple[str, float]]:
    """Returns how many of so many runs gave other bits than the first, forward and backward."""
    ((*first, gradients),) = run()
    counts = np.zeros(2)
    for _ in range(runs - 1):
        ((*again, other_gradients),) = run()
        counts += [_differ(first, again), _differ(gradients, other_gradients)]
    return [("forward", float(counts[0])), ("backward", float(counts[1]))]


@jax.jit
def _differ(one: Any, other: Any) -> Array:
    def differ(a: Array, b: Array) -> Array:
        bits = f"uint{8 * a.dtype.itemsize}"
        return (a.view(bits) != b.view(bits)).any()

    return jnp.stack(jax.tree.leaves(jax.tree.map(differ, one, other))).any()
