"""Times programs in turns: in every round each of them once, in an order drawn anew.

Whatever else the machine does then falls on all of them alike, and the ratio of two medians
says more than either median. Compiling is measured in turns, too.
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
LEAST = 0.005  # seconds: a timing is of as many calls as take this long
MOST_CALLS = 2000

Key = TypeVar("Key", bound=Hashable)


def _largest_cache() -> int:
    """Returns the bytes of the largest cache; 256 MiB where the system does not tell."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    known = [int(size.read_text().strip().removesuffix("K")) * 2**10 for size in sizes]
    return max(known, default=2**28)


# Values of float32 that fill the caches of all cores, read and written.
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
    """Holds what is to be timed: `wait(call())` returns when its result is there."""

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    # Fills the caches with something else, by the threads that the program uses.
    evict: Callable[[], object] = lambda: _evictor()()


def interleave(
    programs: Mapping[Key, Program], rounds: int, *, cold: bool = False, title: str = "timing"
) -> dict[Key, NDArray[np.float64]]:
    """Returns milliseconds of each program, one value a round, behind a progress bar.

    On a CPU each call is waited for, or it would run beside the next. A GPU runs calls one
    after the other, while the host hands out the next: there only the last is waited for.

    A timing begins when the program has just run, untimed: the one before has left its own
    threads spinning and the caches full of its own. Where it is to be `cold`, each is of a
    single call, and what ran before it filled the caches with an array of twice their size:
    one of half the size leaves some of x there, one of twice the size changes nothing. That
    the programs alternate is not enough, since those in JAX share x and dy.
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
    """Returns the seconds of all calls."""
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
    return min(max(1, math.ceil(LEAST / quickest)), MOST_CALLS)


class Compiled(NamedTuple):
    """Holds a compiled program, and what it took and takes."""

    call: Callable[..., Any]
    seconds: float  # of the processor: what else the machine does is not in it
    temporaries: int  # bytes


def compile_in_turns(
    functions: Mapping[Key, tuple[Callable[..., Any], Sequence[Any]]], rounds: int
) -> dict[Key, Compiled]:
    """Compiles functions for their arguments; of the seconds the median counts.

    JAX forgets what it has traced before, so that nobody gains from the order.
    """
    found: dict[Key, list[Compiled]] = {key: [] for key in functions}
    for _ in range(rounds):
        for key, (function, arguments) in functions.items():
            jax.clear_caches()
            start = time.process_time()
            call = jax.jit(function).trace(*arguments).lower().compile()
            seconds = time.process_time() - start
            needs: Any = call.memory_analysis()
            found[key].append(Compiled(call, seconds, needs.temp_size_in_bytes))
    return {
        key: turns[-1]._replace(seconds=float(np.median([turn.seconds for turn in turns])))
        for key, turns in found.items()
    }
