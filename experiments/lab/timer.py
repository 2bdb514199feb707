"""Times programs in turns: in every round each of them once, in an order drawn anew.

Whatever else the machine does then falls on all of them alike, and the ratio of two medians
says more than either median.
"""

import contextlib
import ctypes
import functools
import gc
import math
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

WARM_UPS = 2
# A timing is of as many calls as take this long, in seconds: the clock ticks in far less.
LEAST = 0.005
MOST_CALLS = 2000
# The calls that the host's time is taken over: fewer than JAX lets be under way at once.
FIRST = 8

Key = TypeVar("Key", bound=Hashable)


def largest_cache() -> int:
    """Returns the bytes of the largest cache; 256 MiB where the system does not tell."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    known = [int(size.read_text().strip().removesuffix("K")) * 2**10 for size in sizes]
    return max(known, default=2**28)


# Values of float32 that fill the caches of all cores, read and written.
EVICTING = 2 * largest_cache() // 4


@functools.cache
def _evictor() -> Callable[[], object]:
    negative = jax.jit(lambda x: -x, donate_argnums=0)
    array = jnp.ones(EVICTING)

    def evict() -> None:
        nonlocal array
        array = jax.block_until_ready(negative(array))

    return evict


@dataclass(frozen=True)
class Program:
    """Holds what is to be timed: `wait(call())` returns when its result is there."""

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    instances: int = 1  # what is timed is done so many times in one call
    note: str = ""  # what is to be said beside its times
    # Fills the caches with something else, by the threads that the program uses.
    evict: Callable[[], object] = lambda: _evictor()()


class Times(NamedTuple):
    """Holds seconds for each instance, one value a round, each over so many calls."""

    seconds: NDArray[np.float64]
    calls: int
    # Seconds in which the host handed out a call: all of them, where it is the host that is
    # measured. NaN where each call is waited for.
    host: NDArray[np.float64]

    def percentiles(self, *at: float) -> list[float]:
        """Returns these percentiles over the rounds, in milliseconds."""
        return [float(value) for value in np.percentile(1e3 * self.seconds, at)]


def interleave(
    programs: Mapping[Key, Program],
    rounds: int,
    *,
    seed: int = 0,
    least: float = LEAST,
    wait_for_each: bool | None = None,
    cold: bool = False,
    failed: Callable[[Key, Exception], object] | None = None,
    title: str = "timing",
) -> dict[Key, Times]:
    """Times the programs in turns, behind a progress bar.

    `wait_for_each` is the default on a CPU, where a call that is not waited for runs beside the
    next. A GPU runs calls one after the other, while the host hands out the next: there only
    the last is waited for. `least`, the seconds of a timing, should be long beside the some
    50 us until the first call runs and the host has heard of the last one's end.

    A timing begins when the program has just run, untimed: the one before has left its own
    threads spinning and the caches full of its own. Where it is to be `cold`, each is of a
    single call, and what ran before it filled the caches with an array of twice their size.
    That the programs alternate is not enough: those in JAX share x and dy, and where x is 1 MiB
    the arrays of all are no more than a cache holds. There a call takes 1.3 to 1.6 times as
    long after that array as after the other programs alone; one of half the size leaves some,
    and one of twice the size changes nothing.

    What raises an exception is left out from there on, and `failed` is told; or it is raised.
    """
    if wait_for_each is None:
        wait_for_each = jax.default_backend() == "cpu"
    shuffle = random.Random(seed).shuffle
    calls: dict[Key, int] = {}
    taken: dict[Key, list[tuple[float, float]]] = {key: [] for key in programs}

    @contextlib.contextmanager
    def attempt(key: Key) -> Iterator[Program]:
        try:
            yield programs[key]
        except Exception as error:  # whatever it is, the others are to be timed
            if failed is None:
                raise
            calls.pop(key, None)
            failed(key, error)

    for key in programs:
        with attempt(key) as program:
            calls[key] = _calls(program, 0.0 if cold else least)
    gc.disable()
    try:
        repeated = range(WARM_UPS + rounds)
        for _ in tqdm(repeated, desc=f"{title:>28}", leave=False, disable=None):
            order = list(calls)
            shuffle(order)
            for key in order:
                with attempt(key) as program:
                    if cold:
                        program.evict()
                    else:
                        program.wait(program.call())
                    taken[key].append(_time(program, calls[key], wait_for_each))
    finally:
        gc.enable()
    found = {}
    for key, count in calls.items():
        seconds, host = np.array(taken[key][WARM_UPS:]).T
        instances = programs[key].instances
        found[key] = Times(seconds / (count * instances), count, host / instances)
    return found


def keep_memory() -> bool:
    """Lets the C library keep what is freed, from now on; returns whether it can.

    By default glibc gives large arrays back to the system and takes them anew, a page at a
    time, at every call: often more time than the arithmetic takes, and never the same.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # of malloc.h
    # One arena, as the others hold no array of 64 MiB.
    settings = {mmap_max: 0, trim_threshold: 2**31 - 1, top_pad: 2**26, arena_max: 1}
    return all(mallopt(*setting) == 1 for setting in settings.items())


def _time(program: Program, calls: int, wait_for_each: bool) -> tuple[float, float]:
    """Returns the seconds of all calls, and those in which the host handed out one."""
    call, wait, result, handed_out = program.call, program.wait, None, math.nan
    start = time.perf_counter()
    if wait_for_each:
        for _ in range(calls):
            result = wait(call())
    else:
        first = min(calls, FIRST)  # which nothing holds up
        for _ in range(first):
            result = call()
        handed_out = (time.perf_counter() - start) / first
        for _ in range(calls - first):
            result = call()
        wait(result)
    stop = time.perf_counter()
    del result  # not timed
    return stop - start, handed_out


def _calls(program: Program, least: float) -> int:
    program.wait(program.call())  # compiles
    quickest = min(_time(program, 1, True)[0] for _ in range(3))
    return min(max(1, math.ceil(least / quickest)), MOST_CALLS)
