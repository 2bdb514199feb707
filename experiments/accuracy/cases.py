"""Draws the batches on which accurate and inaccurate normalisation differ.

Every implementation is right at mean 0 and standard deviation 1. What tells them apart is a
channel far from zero, a constant one, an outlier, many values, and half precision.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from experiments.lab.exact import Batch

Draw = Callable[[np.random.RandomState], NDArray]

CHANNELS = 8
DRAWS = 8
# The ranges of the constants, up to the largest number in float16.
CONSTANTS = (1e-3, 1.0, 1e3, 65504.0)
GROUPS = ("constant", "mean/std", "affine", "n", "outlier", "OneFlow", "half precision")
CONSTANT, RATIO, AFFINE, COUNT, OUTLIER, ONEFLOW, HALF = GROUPS


@dataclass(frozen=True)
class Case:
    """Describes one kind of batch; `at` is its place on the axis of its group, if there is one.

    Of `draws` batches the worst counts, since some errors are rare: where XLA computes the mean
    in two loops, in only one of them by a fused multiply-add, one channel in a hundred may be
    normalised by another mean than its variance was taken around.
    """

    name: str
    group: str
    at: float
    draw: Draw
    draws: int = 1
    dtype: str = "float32"
    affine: bool = False  # weight and bias at random, rather than 1 and 0
    gradient_of_sum: bool = False  # dy is 1, rather than random

    def batch(self, number: int = 0) -> Batch:
        """Returns a batch in the dtype of the case; weight and bias are float32."""
        # Seeded per case, so that a new case leaves the batches of the others as they are.
        random = np.random.RandomState([zlib.crc32(self.name.encode()), number])
        x = self.draw(random).astype(jnp.dtype(self.dtype))
        dy = np.ones(x.shape) if self.gradient_of_sum else random.standard_normal(x.shape)
        channels = x.shape[1]
        weight, bias = np.ones(channels), np.zeros(channels)
        if self.affine:
            weight, bias = random.uniform(0.5, 1.5, channels), random.uniform(-1, 1, channels)
        return Batch(x, dy.astype(x.dtype), weight.astype(np.float32), bias.astype(np.float32))


def power(value: float) -> str:
    return f"1e{round(np.log10(value))}"


def cases(n: int, largest: int) -> tuple[Case, ...]:
    """Returns all cases: `n` values a channel if nothing else is said, `largest` at most."""
    ratios = [10.0**k for k in range(8)]
    counts = [10**k for k in range(1, 7) if 10**k <= largest]
    # Small batches take no time, and 64 of them have 512 channels.
    many = {k: min(max(80_000 // k, 1), 64) for k in counts}
    pair = np.array([[-1.83965693], [-1.82964566]])
    half = (("float16", 300, 1), ("float16", 0, 300), ("bfloat16", 100, 1))
    return (
        *(
            Case(f"constants to {high:g}, n = {k}", CONSTANT, high, _constant(k, low, high))
            for k in (7, 121)
            for low, high in pairwise(CONSTANTS)
        ),
        Case("constants, n = 9, affine", CONSTANT, 0, _constant(9, 1e-3, 65504), affine=True),
        *(Case(f"mean/std = {power(r)}", RATIO, r, _ratio(n, r), DRAWS) for r in ratios),
        Case("mean/std = 1e3, affine", AFFINE, 1e3, _ratio(n, 1e3), DRAWS, affine=True),
        *(Case(f"n = {power(k)}", COUNT, k, _ratio(k, 1e3), many[k]) for k in counts),
        Case("outlier first", OUTLIER, 0, _outlier(n, 0), DRAWS),
        Case("outlier elsewhere", OUTLIER, 0, _outlier(n, 7), DRAWS),
        Case("OneFlow's pair", ONEFLOW, 0, lambda _: pair, gradient_of_sum=True),
        *(
            Case(f"{d}, mean {mean}, std {std}", HALF, 0, _normal(n, mean, std), DRAWS, d)
            for d, mean, std in half
        ),
    )


def _constant(n: int, low: float, high: float) -> Draw:
    """Draws channels that are constant, at values from `low` to `high`."""
    famous = [value for value in (0.1, 3.3, 1000.1) if low < value < high]
    values = np.concatenate([famous, np.geomspace(low, high, 63)])
    return lambda random: np.broadcast_to(values, (n, len(values)))


def _normal(n: int, mean: ArrayLike, std: ArrayLike) -> Draw:
    """Draws n = 10^k values a channel: about as many examples as positions."""
    k = len(str(n)) - 1
    shape = 10 ** ((k + 1) // 2), CHANNELS, 10 ** (k // 2)
    mean, std = (np.reshape(value, (-1, 1)) for value in (mean, std))
    return lambda random: mean + std * random.standard_normal(shape)


def _ratio(n: int, ratio: float) -> Draw:
    """Draws channels of both signs and of a standard deviation between 0.3 and 30."""

    def draw(random: np.random.RandomState) -> NDArray:
        std = 10 ** random.uniform(-0.5, 1.5, CHANNELS)
        sign = np.where(np.arange(CHANNELS) % 2, -1, 1)
        return _normal(n, ratio * std * sign, std)(random)

    return draw


def _outlier(n: int, place: int) -> Draw:
    """Draws a batch whose `place`-th example begins with 1e6 in every channel."""

    def draw(random: np.random.RandomState) -> NDArray:
        x = _normal(n, 0, 1)(random)
        x[place, :, 0] = 1e6
        return x

    return draw


CASES = cases(n=10_000, largest=1_000_000)
QUICK = cases(n=1_000, largest=10_000)
BY_NAME = {case.name: case for case in CASES}
