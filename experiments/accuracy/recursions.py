"""Writes out what each approach normalises by, in NumPy: the reference of the strategies.

A recursion takes a pair (mean, variance) of each batch, and a momentum. After each batch it
yields the pair that normalises it in training, and the pair that normalises at inference. Its
precision is that of what it is given: float64, or `np.longdouble`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

Pairs = Iterable[Any]
Recursion = Callable[[Pairs, Any], Iterator[tuple[Any, Any]]]


def batch(batches: Pairs, m: Any) -> Iterator[tuple[Any, Any]]:
    h, w = 0.0, 0.0
    for b in map(np.array, batches):
        h, w = m * h + (1 - m) * b, m * w + (1 - m)
        yield b, h / w


def ema(batches: Pairs, m: Any) -> Iterator[tuple[Any, Any]]:
    r = None
    for b in map(np.array, batches):
        r = b if r is None else m * r + (1 - m) * b
        yield r, r


def adam(batches: Pairs, m: Any) -> Iterator[tuple[Any, Any]]:
    for _, debiased in batch(batches, m):
        yield debiased, debiased


def smooth_start(batches: Pairs, m: Any) -> Iterator[tuple[Any, Any]]:
    h = 0.0
    for k, b in enumerate(map(np.array, batches), start=1):
        h = m * h + (1 - m) * b
        yield h + m**k * b, h / (1 - m**k)


def variance_clip(recursion: Recursion, ratio: float, start: int) -> Recursion:
    """Returns the recursion of batches whose variance is clipped after `start` of them."""

    def run(batches: Pairs, m: Any) -> Iterator[tuple[Any, Any]]:
        def clipped() -> Iterator[Any]:
            for k, (mean, variance) in enumerate(batches):
                if k >= start:
                    variance = np.clip(variance, g / ratio, ratio * (g + g.mean()))
                yield mean, variance

        for used, remembered in recursion(clipped(), m):
            g = remembered[1]
            yield used, remembered

    return run
