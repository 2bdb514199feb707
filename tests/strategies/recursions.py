"""Computes the recursion of each strategy in NumPy, in the precision of its inputs."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.exact import EPS


def reference(
    approach: str,
    batches: Iterable[Any],
    m: Any,
    ratio: float = np.inf,
    start: int = 0,
    r_max: Any = 1.0,
    d_max: Any = 0.0,
) -> Iterator[tuple[NDArray, NDArray]]:
    """Yields the statistics that normalise each batch in training, and inference afterwards.

    `batches` are pairs (mean, variance), and `m` is the momentum. If `start` is not 0, batches
    after the first `start` are clipped. `r_max` and `d_max`, numbers or functions of the step,
    belong to `renorm`.
    """
    h = w = r = remembered = np.zeros(())
    for k, b in enumerate(map(np.array, batches), start=1):
        if 0 < start < k:
            g = remembered[1]
            b[1] = np.clip(b[1], g / ratio, ratio * (g + g.mean()))
        bounds: list[Any] = [f(k - 1) if callable(f) else f for f in (r_max, d_max)]
        corrected = renormed(b, remembered if k > 1 else b, *bounds)
        h, w = m * h + (1 - m) * b, m * w + (1 - m)
        r = m * r + (1 - m) * b if k > 1 else b
        used, remembered = {
            "batch": (b, h / w),
            "ema": (r, r),
            "adam": (h / w, h / w),
            "smooth_start": (h + m**k * b, h / w),
            "renorm": (corrected, h / w),
        }[approach]
        yield used, remembered


def renormed(
    b: NDArray, running: NDArray, r_max: float, d_max: float, eps: float = EPS
) -> NDArray:
    """Returns the mean and variance that give ((x - mean_b) / sigma_b) r + d."""
    sigma_b, sigma = np.sqrt(b[1] + eps), np.sqrt(running[1] + eps)
    r = np.clip(sigma_b / sigma, 1 / r_max, r_max)
    d = np.clip((b[0] - running[0]) / sigma, -d_max, d_max)
    return np.array([b[0] - d * sigma_b / r, (sigma_b / r) ** 2 - eps])
