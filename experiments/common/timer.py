"""Times programs in turns: each once in every round, in a new random order.

Other load of the machine then affects all programs equally, so the ratio of two medians is more
reliable than either median. Compilation is timed in turns, too. A program may be in a process
of its own.
"""

import atexit
import functools
import gc
import math
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from .progress import progress

WARM_UPS = 2
LEAST = 0.005  # seconds: a timing covers as many calls as take this long
COUNTED = 0.01  # seconds within which Linux updates the processor time of every thread

Key = TypeVar("Key", bound=Hashable)


def _largest_cache() -> int:
    """Returns the bytes of the largest cache, or 256 MiB if the system does not report it."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    known = [int(size.read_text().strip().removesuffix("K")) * 2**10 for size in sizes]
    return max(known, default=2**28)


# The number of float32 values that fill the caches of all cores when read and written.
EVICTING = 2 * _largest_cache() // 4


@functools.cache
def _evictor() -> Callable[[], object]:
    negative = jax.jit(lambda x: -x, donate_argnums=0)
    array = jnp.ones(EVICTING)

    def evict() -> None:
        nonlocal array
        array = jax.block_until_ready(negative(array))

    return evict


class Program(NamedTuple):
    """Holds a program to time: `wait(call())` returns when the result is ready."""

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    # Fills the caches with other data, in the threads that the program uses.
    evict: Callable[[], object] = lambda: _evictor()()
    read: Callable[[Any], Any] = np.asarray

    def answer(self) -> list[NDArray[np.float64]]:
        """Returns y and the gradients of a program that returns y, memory and gradients."""
        y, _, gradients = self.call()
        return [self.read(leaf).astype(np.float64) for leaf in jax.tree.leaves((y, gradients))]

    def turn(self, calls: int, cold: bool, each: bool) -> float:
        """Returns the seconds that all calls take, waiting for `each` or only for the last."""
        call, wait, result = self.call, self.wait, None
        if cold:
            self.evict()
        else:
            for _ in range(calls):
                wait(call())
        start = time.perf_counter()
        for left in reversed(range(calls)):
            result = call()
            if each or not left:
                wait(result)
        stop = time.perf_counter()
        del result  # not timed
        return stop - start


_made: list[Program] = []  # in the process of a `Remote`: its program


def _make(factory: Callable[..., Program], *arguments: Any) -> None:
    _made.clear()
    gc.collect()
    _made.append(factory(*arguments))


def _ask(method: Callable[..., Any], *how: Any) -> Any:
    answer = method(*_made, *how)
    _until_idle()
    return answer


def _until_idle() -> None:
    """Waits until no thread of this process runs: half a second at most."""
    for _ in range(50):
        before = time.process_time()
        time.sleep(COUNTED)
        if time.process_time() - before < COUNTED / 10:
            break


def _end_with_parent() -> None:
    """Ends this process if its parent is killed; otherwise the pool ends this process."""
    gc.disable()
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


class Remote:
    """Runs one program after the other in a process of its own, which takes turns by messages.

    PyTorch's threads spin for 6 to 8 ms after a call, on the cores that XLA needs next: so a
    process takes its turn when the other is idle.
    """

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, spawn, _end_with_parent)
        atexit.register(self.pool.shutdown)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        _until_idle()
        return self.pool.submit(function, *arguments).result()

    def make(self, factory: Callable[..., Program], *arguments: Any) -> Self:
        """Makes the program, by a function that the process can import."""
        self._run(_make, factory, *arguments)
        return self

    answer = functools.partialmethod(_run, _ask, Program.answer)
    turn = functools.partialmethod(_run, _ask, Program.turn)


def interleave(
    programs: Mapping[Key, Program | Remote],
    rounds: int,
    *,
    cold: bool = False,
    title: str = "timing",
) -> dict[Key, NDArray[np.float64]]:
    """Returns the milliseconds of each program in each round, and shows a progress bar.

    On a CPU the timer waits for each call, which would otherwise overlap with the next. A GPU
    runs calls one by one while the host issues the next, so the timer waits for the last only.

    Each timing starts after as many untimed calls, because the program before left its data in
    the caches, and threads that have slept are not on all cores at once. A `cold` timing is of
    one call, after an array of twice the size of the caches has filled the caches (with half of
    this size, parts of x stay in the caches; with double, times do not change).
    """
    each = jax.default_backend() == "cpu"
    shuffle = random.Random(0).shuffle
    calls = {key: 1 if cold else _calls(program) for key, program in programs.items()}
    taken: dict[Key, list[float]] = {key: [] for key in programs}
    order = list(programs)
    gc.disable()
    try:
        for _ in progress(range(WARM_UPS + rounds), "round", f"{title:>28}"):
            shuffle(order)
            for key in order:
                taken[key].append(programs[key].turn(calls[key], cold, each) / calls[key])
    finally:
        gc.enable()
    return {key: 1e3 * np.array(seconds[WARM_UPS:]) for key, seconds in taken.items()}


def _calls(program: Program | Remote) -> int:
    quickest = min(program.turn(1, False, True) for _ in range(3))
    return max(1, math.ceil(LEAST / quickest))


class Compiled(NamedTuple):
    """Holds a compiled program, its compile time and its temporary memory."""

    call: Callable[..., Any]
    seconds: list[float]  # of the processor, without other load of the machine: each round
    temporaries: int  # bytes


def compile_in_turns(
    functions: Mapping[Key, tuple[Callable[..., Any], Sequence[Any]]], rounds: int
) -> dict[Key, Compiled]:
    """Compiles functions for their arguments.

    Before each compilation JAX's caches are cleared, so that the order does not matter, and
    garbage is collected; during a compilation it is not.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in functions}
    compiled = {}
    for _ in range(rounds):
        for key, (function, arguments) in functions.items():
            jax.clear_caches()
            gc.collect()
            gc.disable()
            start = time.process_time()
            compiled[key] = jax.jit(function).trace(*arguments).lower().compile()
            seconds[key].append(time.process_time() - start)
            gc.enable()
    needs: dict[Key, Any] = {key: call.memory_analysis() for key, call in compiled.items()}
    return {
        key: Compiled(call, seconds[key], needs[key].temp_size_in_bytes)
        for key, call in compiled.items()
    }
