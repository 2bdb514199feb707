"""Times programs in turns: each once in every round, in a new random order.

Other load of the machine then affects all of them equally, so the ratio of two medians is more
reliable than either median. Compilation is timed in turns, too.
"""

import functools
import gc
import math
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

WARM_UPS = 2
LEAST = 0.005  # seconds: a timing covers as many calls as take this long

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


def interleave(
    programs: Mapping[Key, Program], rounds: int, *, cold: bool = False, title: str = "timing"
) -> dict[Key, NDArray[np.float64]]:
    """Returns the milliseconds of each program in each round, and shows a progress bar.

    On a CPU it waits for each call, which would otherwise overlap with the next. A GPU runs
    calls one by one while the host issues the next, so it waits only for the last.

    Each timing starts after an untimed run of the program, because the program before left its
    threads spinning and its data in the caches. A `cold` timing is of one call, after an array
    of twice the size of the caches has filled them (with half of it, parts of x stay there;
    with double, times do not change). Alternation alone would not make a program cold, because
    those in JAX share x and dy.
    """
    wait_for_each = jax.default_backend() == "cpu"
    shuffle = random.Random(0).shuffle
    calls = {key: 1 if cold else _calls(program) for key, program in programs.items()}
    taken: dict[Key, list[float]] = {key: [] for key in programs}
    order = list(programs)
    gc.disable()
    try:
        repeated = range(WARM_UPS + rounds)
        for _ in tqdm(repeated, desc=f"{title:>28}", leave=False, disable=None):
            shuffle(order)
            for key in order:
                program = programs[key]
                if cold:
                    program.evict()
                else:
                    program.wait(program.call())
                taken[key].append(_time(program, calls[key], wait_for_each) / calls[key])
    finally:
        gc.enable()
    return {key: 1e3 * np.array(seconds[WARM_UPS:]) for key, seconds in taken.items()}


def _time(program: Program, calls: int, wait_for_each: bool) -> float:
    """Returns the seconds that all calls take."""
    call, wait, result = program.call, program.wait, None
    start = time.perf_counter()
    if wait_for_each:
        for _ in range(calls):
            result = wait(call())
    else:
        for _ in range(calls):
            result = call()
        wait(result)
    stop = time.perf_counter()
    del result  # not timed
    return stop - start


def _calls(program: Program) -> int:
    program.wait(program.call())  # compiles
    quickest = min(_time(program, 1, True) for _ in range(3))
    return max(1, math.ceil(LEAST / quickest))


class Compiled(NamedTuple):
    """Holds a compiled program, its compile time and its temporary memory."""

    call: Callable[..., Any]
    seconds: float  # of the processor, without other load of the machine
    temporaries: int  # bytes


def compile_in_turns(
    functions: Mapping[Key, tuple[Callable[..., Any], Sequence[Any]]], rounds: int
) -> dict[Key, Compiled]:
    """Compiles functions for their arguments; returns the median of the seconds.

    JAX's caches are cleared before each, so that the order does not matter, and garbage is
    collected before, not meanwhile.
    """
    found: dict[Key, list[Compiled]] = {key: [] for key in functions}
    for _ in range(rounds):
        for key, (function, arguments) in functions.items():
            jax.clear_caches()
            gc.collect()
            gc.disable()
            start = time.process_time()
            call = jax.jit(function).trace(*arguments).lower().compile()
            seconds = time.process_time() - start
            gc.enable()
            needs: Any = call.memory_analysis()
            found[key].append(Compiled(call, seconds, needs.temp_size_in_bytes))
    return {
        key: turns[-1]._replace(seconds=float(np.median([turn.seconds for turn in turns])))
        for key, turns in found.items()
    }
