"""Interleaved timing on a GPU: in every round each contender once, in an order drawn anew.

A GPU runs what it is given one after the other, while the host hands out more. So a timing is
of so many calls, handed out at once and waited for at the end, that they take 10 ms: beside
that, the time until the first call runs and until the host has heard of the last one's end
(some 50 us) is nothing. For JAX it is the host's clock, from before the first call to after
the wait; for PyTorch two CUDA events around the calls, which agree with it to that.

What a call costs the host is measured beside it, over the first calls, which nothing holds up.
Where it takes the host as long to hand out a call as all of it takes, it is the host's time
that was measured, and not the device's.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

# The calls that the host's time is taken over: fewer than JAX lets be under way at once.
FIRST = 8
MOST_CALLS = 2000


class Taken(NamedTuple):
    seconds: float  # of all calls
    host: float  # of one call, for the host


class Timed(Protocol):
    """Something that can be called so many times, and be waited for."""

    instances: int  # what it does in one call

    def time(self, calls: int) -> Taken: ...


class Times(NamedTuple):
    """Seconds for each instance, one value a round."""

    seconds: NDArray[np.float64]
    host: NDArray[np.float64]
    calls: int
    instances: int


def by_the_clock(call: Callable[[], object], wait: Callable[[], object], calls: int) -> Taken:
    first = min(calls, FIRST)
    start = time.perf_counter()
    for _ in range(first):
        call()
    handed_out = time.perf_counter()
    for _ in range(calls - first):
        call()
    wait()
    return Taken(time.perf_counter() - start, (handed_out - start) / first)


def interleave(
    contenders: Mapping[str, Callable[[], Timed]], rounds: int, least: float
) -> dict[str, Times | Exception]:
    """`least` seconds a timing, each after one call that does not count. A contender that
    raises, when it is made or later, is left out from there on, and its exception is given."""
    found: dict[str, Times | Exception] = {}
    alive: dict[str, tuple[Timed, int]] = {}
    taken: dict[str, list[Taken]] = {}
    for name, make in contenders.items():
        try:
            timed = make()
            timed.time(1)
            once = timed.time(3).seconds / 3
        except Exception as error:  # whatever it is, the others are to be measured
            found[name] = error
        else:
            calls = min(max(1, math.ceil(least / once)), MOST_CALLS)
            alive[name], taken[name] = (timed, calls), []
    shuffle, collecting = random.Random(0).shuffle, gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            order = list(alive)
            shuffle(order)
            for name in order:
                timed, calls = alive[name]
                try:
                    timed.time(1)
                    taken[name].append(timed.time(calls))
                except Exception as error:
                    found[name] = error
                    del alive[name]
    finally:
        if collecting:
            gc.enable()
    for name, (timed, calls) in alive.items():
        seconds, host = np.array(taken[name]).T
        per = timed.instances
        found[name] = Times(seconds / (calls * per), host / per, calls, per)
    return {name: found[name] for name in contenders}
