"""Defines `Running`, the memory of most strategies, and the base class of these."""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Inexact

from ._base import AbstractStrategy
from ._moments import Moments
from ._pair import Pair


class Running(NamedTuple):
    r"""Holds the debiased exponential moving average of batch means and variances.

    With $b_k$ the mean and variance of batch $k$, and $m$ the momentum,

    $$h_k = m h_{k-1} + (1 - m) b_k, \quad h_0 = 0, \qquad
      w_k = m w_{k-1} + (1 - m), \quad w_0 = 0.$$

    $w_k = 1 - m^k$ is the total weight of the batches, and $m^k$ that of the initial zero.
    Instead of $h_k$, this holds the debiased average $r_k = h_k / w_k$, updated by

    $$r_k = \frac{m w_{k-1}}{w_k} r_{k-1} + \frac{1 - m}{w_k} b_k.$$

    This is equal in exact arithmetic and better in floating point: the first batch is
    remembered to the bit, and statistics that do not change stay the same to the bit.

    **Fields:** `averages`, `(2, channels)`: $r_k$ of means and of variances; `weight_pair`,
    `(1,)`: $w_k$. All are 0 before any batch. Each is a `Pair`; `mean`, `variance` and `weight`
    are their values. A single float would stop moving: at a momentum of 0.99 with a variance
    still wrong by 3e-6, and at 0.9999 with a weight of 0.9995.
    """

    # In one array, because XLA compiles the arithmetic of an array once.
    averages: Pair
    weight_pair: Pair

    @staticmethod
    def empty(channels: int, dtype: DTypeLike) -> "Running":
        """Returns the average before any batch; `dtype` is that of the mean."""
        mean = jnp.zeros((channels,), dtype)
        return Running.loaded(mean, mean.real, 0)

    @staticmethod
    def loaded(
        mean: ArrayLike | Pair, variance: ArrayLike | Pair, weight: ArrayLike = 1
    ) -> "Running":
        """Returns given statistics, `(channels,)`, from PyTorch for example."""
        pairs = Pair.of(mean), Pair.of(variance)
        both = (pair.parts.astype(pairs[0].parts.dtype) for pair in pairs)
        of_weight = Pair.of(jnp.asarray(weight, pairs[1].parts.dtype))
        return Running(Pair(jnp.stack([*both], -3)), of_weight)

    @property
    def mean(self) -> Inexact[Array, "*members channels"]:
        """Returns the average of the means, rounded to one float."""
        return self.averages.value[..., 0, :]

    @property
    def mean_pair(self) -> Pair:
        """Returns the average of the means."""
        return Pair(self.averages.parts[..., 0, :, :])

    @property
    def variance(self) -> Float[Array, "*members channels"]:
        """Returns the average of the variances, rounded to one float; 0 before any batch."""
        return self.averages.value[..., 1, :].real

    @property
    def weight(self) -> Float[Array, "*members"]:
        """Returns the weight of all batches, rounded to one float."""
        return self.weight_pair.value[..., 0]

    def push(self, batch: Moments, momentum: float) -> "Running":
        """Returns the average after one more batch; it uses the batch's `memory_variance`."""
        # Outside of the compiled call, so that a program run op by op divides: inside a larger
        # program XLA may multiply by a reciprocal instead.
        return _pushed(self, batch.mean_pair, Pair.of(batch.memory_variance), momentum)

    @property
    def moments(self) -> Moments:
        """Returns the average as moments; before any batch, mean 0 and variance 1."""
        variance = jnp.where(self.weight_pair.value > 0, self.variance, 1)
        return Moments.of(self.mean_pair, variance)

    def fill(self, batch: Moments) -> Moments:
        """Returns `h + (1 - w) b`: this batch gets the weight of the initial zero."""
        return batch.towards(self.moments, self.weight)


# Compiled, so that JAX traces it once for all layers of a size; run op by op it is one call.
@functools.partial(jax.jit, static_argnums=3)
def _pushed(running: Running, mean: Pair, variance: Pair, momentum: float) -> Running:
    # The weight is the average of ones.
    batch = Running.loaded(mean, variance)
    # The smaller share must be exact: the other is 1 minus it.
    start, end, share = running, batch, 1 - momentum
    if momentum < 0.5:
        start, end, share = batch, running, momentum
    weight = start.weight_pair.moved(end.weight_pair, share)
    share = share * end.weight_pair.value / weight.value
    return Running(start.averages.moved(end.averages, share), weight)


class AbstractRunningStrategy(AbstractStrategy[Running]):
    """Remembers a `Running` and normalises inference by it; the base of most strategies.

    **Fields:** `momentum`: the weight $m$ of the past, strictly between 0 and 1.
    """

    momentum: eqx.AbstractVar[float]

    def __check_init__(self):
        if not 0 < self.momentum < 1:
            raise ValueError(
                f"momentum={self.momentum!r}: it is the weight of the past in the running "
                "statistics, and must be strictly between 0 and 1. (PyTorch's momentum is the "
                "weight of the new batch: its 0.1 is 0.9 here.)"
            )

    def init(self, channels: int, dtype: DTypeLike) -> Running:
        return Running.empty(channels, dtype)

    def infer(self, memory: Running) -> Moments:
        return memory.moments

    def load(self, learnt: Moments) -> Running:
        return Running.loaded(learnt.mean_pair, learnt.memory_variance)
