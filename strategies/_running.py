"""`Running`, the running average that most strategies remember, and their common part."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Inexact

from ._base import AbstractStrategy
from ._moments import Moments
from ._pair import between, rounded


class Running(eqx.Module):
    r"""An exponential moving average of batch means and variances, debiased.

    With $b_k$ the mean and variance of the $k$-th batch and $m$ the momentum,

    $$h_k = m h_{k-1} + (1 - m) b_k, \quad h_0 = 0, \qquad
      w_k = m w_{k-1} + (1 - m), \quad w_0 = 0.$$

    The weight $w_k = 1 - m^k$ is what all batches so far count for together; the rest,
    $m^k$, still belongs to the zero that the average started from. Remembered are not $h_k$
    and a step counter but the debiased average $r_k = h_k / w_k$ and $w_k$ itself, by

    $$r_k = \frac{m w_{k-1}}{w_k} r_{k-1} + \frac{1 - m}{w_k} b_k.$$

    This is the same in exact arithmetic and better in floating point: the first batch is
    remembered to the bit, and a statistic that does not change stays as it is to the bit.
    And statistics loaded from elsewhere simply have weight 1.

    **Fields:** `mean` `(channels,)`, `variance` `(channels,)`: $r_k$; `weight` `()`: $w_k$.
    Before any batch all are 0. Each has a rest (`mean_rest`, `variance_rest`, `weight_rest`; 0
    unless given), what rounding has left out of it: one step moves an average by so little
    that in one float it would come to a halt, from a momentum of 0.99 on at a variance off by
    3e-6, and at one of 0.9999 at a weight of 0.9995.
    """

    mean: Inexact[Array, " channels"]
    variance: Float[Array, " channels"]
    weight: Float[Array, ""]
    # Filled in by __post_init__.
    mean_rest: Inexact[Array, " channels"] = None  # pyright: ignore[reportAssignmentType]
    variance_rest: Float[Array, " channels"] = None  # pyright: ignore[reportAssignmentType]
    weight_rest: Float[Array, ""] = None  # pyright: ignore[reportAssignmentType]

    def __post_init__(self):
        for name in ("mean", "variance", "weight"):
            if getattr(self, f"{name}_rest") is None:
                setattr(self, f"{name}_rest", jnp.zeros_like(getattr(self, name)))

    @classmethod
    def empty(cls, channels: int, dtype: DTypeLike) -> "Running":
        """Returns the average before any batch. `dtype` is the mean's; the rest is real."""
        mean = jnp.zeros((channels,), dtype)
        return cls(mean, mean.real, jnp.zeros((), mean.real.dtype))

    @classmethod
    def loaded(cls, mean: ArrayLike, variance: ArrayLike) -> "Running":
        """Returns finished statistics, PyTorch's for example: their weight is 1."""
        mean, variance = jnp.asarray(mean), jnp.asarray(variance)
        return cls(mean, variance, jnp.ones((), variance.dtype))

    def push(self, batch: Moments, momentum: float) -> "Running":
        """Returns the average after one more batch; of its variance, `memory_variance`."""
        # Divided outside of the call, where it may be run by itself: in another program XLA may
        # multiply by a reciprocal instead.
        variance = rounded(batch.memory_variance)
        return _pushed(self, batch.mean, batch.mean_rest, variance, momentum)

    @property
    def moments(self) -> Moments:
        """The average as moments; the identity before any batch."""
        variance = jnp.where(self.weight > 0, self.variance, 1)
        return Moments.of(self.mean, variance, self.mean_rest)

    def fill(self, batch: Moments) -> Moments:
        """Returns `h + (1 - w) b`: what no batch has filled yet is taken from this one."""
        return batch.towards(self.moments, self.weight)


# Traced once for all layers of one size, and one call where a program is run op by op.
@functools.partial(jax.jit, static_argnums=4)
def _pushed(
    running: Running, mean: Array, rest: Array, variance: Array, momentum: float
) -> Running:
    one = jnp.ones_like(running.weight)
    kept, share = momentum * one, (1 - momentum) * one
    # The weight is the average of ones.
    old, new = (running.weight, running.weight_rest), (one, 0 * one)
    weight, weight_rest = between(old, new, kept, share)
    kept, share = kept * running.weight / weight, share / weight
    old, new = (running.mean, running.mean_rest), (mean, rest)
    mean, mean_rest = between(old, new, kept, share)
    old, new = (running.variance, running.variance_rest), (variance, jnp.zeros_like(variance))
    variance, variance_rest = between(old, new, kept, share)
    return Running(mean, variance, weight, mean_rest, variance_rest, weight_rest)


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
