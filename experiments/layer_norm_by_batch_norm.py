"""Layer norm made of batch norm, as OneFlow's was: examples for channels, a batch of one."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .layer_norm_layers import Batch, Layer

SHAPES = ((4, 7), (6, 3, 5), (8, 64), (3, 2, 3, 4))
DTYPES = ("float32", "float64")


class Row(NamedTuple):
    dtype: str
    layer: str
    difference: float  # of y, the largest over the shapes


def measure(layers: Iterable[Layer]) -> list[Row]:
    return [
        Row(dtype, layer.name, max(_difference(layer, shape, dtype) for shape in SHAPES))
        for dtype in DTYPES
        for layer in layers
    ]


def _difference(layer: Layer, shape: tuple[int, ...], dtype: str) -> float:
    x = np.random.RandomState(0).normal(3, 2, shape).astype(dtype)
    y = layer.answer(Batch(x, x, None, None)).y
    return float(np.max(np.abs(y - layer.by_batch_norm(x))))
