"""`Running`, the running average that most strategies remember, and their common part."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Inexact

from ._base import AbstractStrategy
from ._moments import Moments


class Running(eqx.Module):
    r"""An exponential moving average of batch means and variances, started from zero.

    With $b_k$ the mean and variance of the $k$-th batch and $m$ the momentum,

    $$h_k = m h_{k-1} + (1 - m) b_k, \quad h_0 = 0, \qquad
      w_k = m w_{k-1} + (1 - m), \quad w_0 = 0.$$

    The weight $w_k = 1 - m^k$ is what all batches so far count for together; the rest,
    $m^k$, still belongs to the zero that the average started from. It is remembered as a
    number rather than computed from a step counter, so that statistics loaded from elsewhere
    simply have weight 1 and are never debiased again.

    **Fields:** `mean` `(channels,)`, `variance` `(channels,)`, `weight` `()`.
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

    def push(self, batch: Moments, momentum: ArrayLike) -> "Running":
        """The average after one more batch."""
        keep = jnp.asarray(momentum, self.weight.dtype)
        take = jnp.asarray(1 - momentum, self.weight.dtype)
        return Running(
            keep * self.mean + take * batch.mean,
            keep * self.variance + take * batch.memory_variance,
            keep * self.weight + take,
        )

    def debias(self) -> Moments:
        """`h / w`, as Adam corrects its averages; the identity before any batch."""
        seen = self.weight > 0
        weight = jnp.where(seen, self.weight, 1)
        return Moments.of(self.mean / weight, jnp.where(seen, self.variance / weight, 1))

    def fill(self, batch: Moments) -> Moments:
        """`h + (1 - w) b`: the part that no batch has filled yet is taken from this one."""
        rest = 1 - self.weight
        return Moments.of(self.mean + rest * batch.mean, self.variance + rest * batch.variance)


class AbstractRunningStrategy(AbstractStrategy[Running]):
    """A strategy whose memory is a `Running`, and whose inference is its debiased value."""

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
        return memory.debias()
