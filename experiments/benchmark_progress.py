"""Bars for what the benchmark spends its time on."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import jax
from tqdm import tqdm

from . import benchmark_timing
from .benchmark_layers import Program
from .benchmark_timing import Key, Times


@contextmanager
def bar(description: str, total: int) -> Iterator[Callable[[], object]]:
    with tqdm(total=total, desc=f"{description:>28}", leave=False, disable=None) as progress:
        yield lambda: progress.update()


def interleave(
    description: str, programs: Mapping[Key, Program], rounds: int
) -> dict[Key, Times]:
    """As `benchmark_timing.interleave`, on the device at hand."""
    with bar(description, len(programs) * (benchmark_timing.WARM_UPS + rounds)) as step:
        return benchmark_timing.interleave(
            programs, rounds, wait_for_each=jax.default_backend() == "cpu", after=step
        )
