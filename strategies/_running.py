"""`Running`, the running average that most strategies remember, and their common part."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Inexact

from ._base import AbstractStrategy
from ._moments import Moments


class Running(eqx.Module):
    r"""An exponential moving average of batch means and variances, debiased.

    With $b_k$ the mean and variance of the $k$-th batch and $m$ the momentum,

    $$h_k = m h_{k-1} + (1 - m) b_k, \quad h_0 = 0, \qquad
      w_k = m w_{k-1} + (1 - m), \quad w_0 = 0.$$

    The weight $w_k = 1 - m^k$ is what all batches so far count for together; the rest,
    $m^k$, still belongs to the zero that the average started from. Remembered are not $h_k$
    and a step counter but the debiased average $r_k = h_k / w_k$ and $w_k$ itself, by

    $$r_k = r_{k-1} + \frac{1 - m}{w_k} (b_k - r_{k-1}).$$

    This is the same in exact arithmetic and better in floating point: the first batch is
    remembered to the bit, and a statistic that does not change stays as it is to the bit.
    And statistics loaded from elsewhere simply have weight 1.

    **Fields:** `mean` `(channels,)`, `variance` `(channels,)`: $r_k$; `weight` `()`: $w_k$.
    Before any batch all are 0.
    """

    mean: Inexact[Array, " channels"]
    variance: Float[Array, " channels"]
    weight: Float[Array, ""]

    @classmethod
    def empty(cls, channels: int, dtype: DTypeLike) -> "Running":
        """Before any batch. `dtype` is the mean's; the rest is real."""
        mean = jnp.zeros((channels,), dtype)
        return cls(mean, mean.real, jnp.zeros((), mean.real.dtype))

    @classmethod
    def loaded(cls, mean: ArrayLike, variance: ArrayLike) -> "Running":
        """Finished statistics, PyTorch's for example: their weight is 1."""
        mean, variance = jnp.asarray(mean), jnp.asarray(variance)
        return cls(mean, variance, jnp.ones((), variance.dtype))

    def push(self, batch: Moments, momentum: float) -> "Running":
        """The average after one more batch."""
        weight = momentum * self.weight + (1 - momentum)
        share = (1 - momentum) / weight
        return Running(
            self.mean + share.astype(self.mean.dtype) * (batch.mean - self.mean),
            self.variance + share * (batch.memory_variance - self.variance),
            weight,
        )

    @property
    def moments(self) -> Moments:
        """The average as moments; the identity before any batch."""
        return Moments.of(self.mean, jnp.where(self.weight > 0, self.variance, 1))

    def fill(self, batch: Moments) -> Moments:
        """`h + (1 - w) b`: the part that no batch has filled yet is taken from this one."""
        weight = self.weight.astype(self.mean.dtype)
        return Moments.of(
            batch.mean + weight * (self.mean - batch.mean),
            batch.variance + self.weight * (self.variance - batch.variance),
        )


class AbstractRunningStrategy(AbstractStrategy[Running]):
    """A strategy whose memory is a `Running`, which is also what inference uses."""

    momentum: eqx.AbstractVar[float]

    def __check_init__(self):
        if not 0 < self.momentum < 1:
            raise ValueError(
                f"momentum={self.momentum!r}: the momentum is the share of the running "
                "statistics that one batch leaves as it was, strictly between 0 and 1. "
                "(PyTorch's `momentum` is the other share: its 0.1 is 0.9 here.)"
            )

    def init(self, channels: int, dtype: DTypeLike) -> Running:
        return Running.empty(channels, dtype)

    def infer(self, memory: Running) -> Moments:
        return memory.moments
