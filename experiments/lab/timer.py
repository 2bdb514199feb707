"""Interleaved timing: in every round each program once, in an order drawn anew.

Whatever else the machine does then falls on all of them alike, and the ratio of two medians
says more than either median.
"""

import ctypes
import gc
import math
import random
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

WARM_UPS = 2
# A timing is of as many calls as take this long, in seconds: the clock ticks in far less.
LEAST = 0.005

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Program:
    """Something to time: `wait(call())` returns when its result is there."""

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready


class Times(NamedTuple):
    """Seconds per call, one value a round, each over so many calls."""

    seconds: NDArray[np.float64]
    calls: int

    def percentiles(self, *at: float) -> list[float]:
        """Returns these percentiles over the rounds, in milliseconds."""
        return [float(value) for value in np.percentile(1e3 * self.seconds, at)]


def interleave(
    programs: Mapping[Key, Program],
    rounds: int,
    *,
    seed: int = 0,
    wait_for_each: bool | None = None,
    title: str = "timing",
) -> dict[Key, Times]:
    """Times the programs in turns, behind a progress bar.

    `wait_for_each` is for CPUs, where a call that is not waited for runs beside the next, and
    the default there. A GPU runs calls one after the other, and launches the next meanwhile.
    """
    if wait_for_each is None:
        wait_for_each = jax.default_backend() == "cpu"
    order, shuffle = list(programs), random.Random(seed).shuffle
    total = len(programs) * (WARM_UPS + rounds)
    calls = {key: _calls(programs[key]) for key in order}
    seconds: dict[Key, list[float]] = {key: [] for key in order}
    collecting = gc.isenabled()
    gc.disable()
    try:
        with tqdm(total=total, desc=f"{title:>28}", leave=False, disable=None) as progress:
            for round_ in range(WARM_UPS + rounds):
                shuffle(order)
                for key in order:
                    # Untimed: the program before has left its threads spinning, and the caches
                    # full of its own.
                    programs[key].wait(programs[key].call())
                    taken = _time(programs[key], calls[key], wait_for_each)
                    if round_ >= WARM_UPS:
                        seconds[key].append(taken / calls[key])
                    progress.update()
    finally:
        if collecting:
            gc.enable()
    return {key: Times(np.array(seconds[key]), calls[key]) for key in programs}


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
    settings = (
        (mmap_max, 0),
        (trim_threshold, 2**31 - 1),
        (top_pad, 2**26),
        (arena_max, 1),
    )
    return all(mallopt(*setting) == 1 for setting in settings)


def _time(program: Program, calls: int, wait_for_each: bool) -> float:
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
