"""OneFlow's pair: two values close to each other, whose output and gradient were wrong.

https://github.com/Oneflow-Inc/oneflow/issues/6149
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .layer_norm_layers import EPS, Batch, Layer

PAIR = (-1.83965693, -1.82964566)
# Pairs as far apart as that one, at ever larger means: for the figure.
MEANS = np.geomspace(0.01, 1e4, 61)


class Row(NamedTuple):
    dtype: str
    layer: str
    y: float  # of the second value; the first one's is its opposite
    error: float  # of y, the larger of both
    dx: float  # of the sum of y: the larger of both; 0 is right


def exact(x: NDArray) -> NDArray:
    """[N, 2]: for a pair at distance 2h, y is -+ h / sqrt(h^2 + eps)."""
    wide = x.astype(np.longdouble)
    half = (wide[:, 1:] - wide[:, :1]) / 2
    y = half / np.sqrt(half**2 + np.longdouble(EPS))
    return np.concatenate([-y, y], axis=1)


def measure(layers: Iterable[Layer]) -> list[Row]:
    rows = []
    for dtype in ("float32", "float64"):
        x = np.array([PAIR], dtype)
        for layer in layers:
            y, dx = answer(layer, x)
            error = float(np.max(np.abs(y - exact(x))))
            rows.append(Row(dtype, layer.name, float(y[0, 1]), error, float(np.abs(dx).max())))
    return rows


def at_means(layers: Iterable[Layer]) -> dict[str, NDArray]:
    """The layer's errors of y and its dx, `(2, means)`, in float32."""
    half = (PAIR[1] - PAIR[0]) / 2
    x = np.stack([MEANS - half, MEANS + half], axis=1).astype(np.float32)
    found = {}
    for layer in layers:
        y, dx = answer(layer, x)
        found[layer.name] = np.stack([np.abs(y - exact(x)).max(1), np.abs(dx).max(1)])
    return found


def answer(layer: Layer, x: NDArray) -> tuple[NDArray, NDArray]:
    gave = layer.answer(Batch(x, np.ones_like(x), None, None))
    return gave.y, gave.dx
