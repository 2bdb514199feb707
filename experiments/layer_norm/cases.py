"""Draws what layer norms are given: OneFlow's pair, pairs like it, and other shapes.

https://github.com/Oneflow-Inc/oneflow/issues/6149
"""

import itertools
from collections.abc import Iterable, Iterator

import jax.numpy as jnp
import numpy as np

from experiments.lab.exact import Batch

PAIR = (-1.83965693, -1.82964566)
# Pairs as far apart as that one, at ever larger means.
MEANS = np.geomspace(0.01, 1e4, 61)
DIMENSIONS = (1, 2, 3, 4)
DTYPES = ("float32", "float64", "bfloat16")
# With weight, with bias.
AFFINE = ((True, True), (True, False), (False, True))
# Of a layer norm that is made of a batch norm.
SHAPES = ((4, 7), (6, 3, 5), (8, 64), (3, 2, 3, 4))


def pair(dtype: str) -> Batch:
    """Returns OneFlow's pair, whose output is summed."""
    x = np.array([PAIR], dtype)
    return Batch(x, np.ones_like(x), None, None)


def pairs() -> Batch:
    """Returns a pair for each of `MEANS`, in float32."""
    half = (PAIR[1] - PAIR[0]) / 2
    x = np.stack([MEANS - half, MEANS + half], axis=1).astype(np.float32)
    return Batch(x, np.ones_like(x), None, None)


def batches(dtype: str, dimensions: Iterable[int]) -> Iterator[Batch]:
    """Yields batches of drawn shapes, of every such rank with weight, bias or both."""
    for rank, (with_weight, with_bias) in itertools.product(dimensions, AFFINE):
        random = np.random.RandomState([rank, with_weight, with_bias])
        shape = tuple(random.randint(2, 13 if rank < 3 else 7, rank))
        examples = random.randint(2, 9)
        mean, std = random.uniform(-30, 30), 10 ** random.uniform(-1, 1)
        x = mean + std * random.standard_normal((examples, *shape))
        dy = random.standard_normal(x.shape)
        wide = np.float64 if dtype == "float64" else np.float32
        weight, bias = random.uniform(0.5, 1.5, shape), random.uniform(-1, 1, shape)
        narrow = jnp.dtype(dtype)
        yield Batch(
            x.astype(narrow),
            dy.astype(narrow),
            weight.astype(wide) if with_weight else None,
            bias.astype(wide) if with_bias else None,
        )
