"""Defines `Running`, the memory of most strategies, and the base class of these."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Inexact

from ._base import AbstractStrategy
from ._moments import Moments
from ._pair import Pair, between, moved, rounded


class Running(eqx.Module):
    r"""Holds the debiased exponential moving average of batch means and variances.

    With $b_k$ the mean and variance of batch $k$, and $m$ the momentum,

    $$h_k = m h_{k-1} + (1 - m) b_k, \quad h_0 = 0, \qquad
      w_k = m w_{k-1} + (1 - m), \quad w_0 = 0.$$

    $w_k = 1 - m^k$ is the total weight of the batches, and $m^k$ that of the initial zero.
    Instead of $h_k$, this holds the debiased average $r_k = h_k / w_k$, updated by

    $$r_k = \frac{m w_{k-1}}{w_k} r_{k-1} + \frac{1 - m}{w_k} b_k.$$

    This is equal in exact arithmetic and better in floating point: the first batch is
    remembered to the bit, and statistics that do not change stay the same to the bit.

    **Fields:** `mean` and `variance`, `(channels,)`: $r_k$; `weight`, `()`: $w_k$. All are 0
    before any batch. `mean_rest`, `variance_rest` and `weight_rest` are their rounding errors,
    by default 0. Without them an average would stop moving: at a momentum of 0.99 with a
    variance still wrong by 3e-6, and at 0.9999 with a weight of 0.9995.
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
        """Returns the average before any batch; `dtype` is that of the mean."""
        mean = jnp.zeros((channels,), dtype)
        return cls(mean, mean.real, jnp.zeros((), mean.real.dtype))

    @classmethod
    def loaded(cls, mean: ArrayLike, variance: ArrayLike) -> "Running":
        """Returns given statistics, `(channels,)`, from PyTorch for example, with weight 1."""
        mean, variance = jnp.asarray(mean), jnp.asarray(variance)
        return cls(mean, variance, jnp.ones((), variance.dtype))

    def push(self, batch: Moments, momentum: float) -> "Running":
        """Returns the average after one more batch; it uses the batch's `memory_variance`."""
        # Outside of the compiled call, so that a program run op by op divides: inside a larger
        # program XLA may multiply by a reciprocal instead.
        variance = rounded(batch.memory_variance)
        return _pushed(self, batch.mean, batch.mean_rest, variance, momentum)

    @property
    def moments(self) -> Moments:
        """Returns the average as moments; before any batch, mean 0 and variance 1."""
        variance = jnp.where(self.weight > 0, self.variance, 1)
        return Moments.of(self.mean, variance, self.mean_rest)

    def fill(self, batch: Moments) -> Moments:
        """Returns `h + (1 - w) b`: this batch gets the weight of the initial zero."""
        return batch.towards(self.moments, self.weight)


# Compiled, so that JAX traces it once for all layers of a size; run op by op it is one call.
@functools.partial(jax.jit, static_argnums=4)
def _pushed(
    running: Running, mean: Array, rest: Array, variance: Array, momentum: float
) -> Running:
    # The weight is the running average of ones.
    old = Pair(running.weight, running.weight_rest)
    one = Pair(jnp.ones_like(running.weight), jnp.zeros_like(running.weight))
    near_one = momentum < 0.5
    w = moved(one, momentum, old, one) if near_one else moved(old, 1 - momentum, one, old)
    kept, share = momentum * running.weight / w.value, (1 - momentum) / w.value
    old, new = Pair(running.mean, running.mean_rest), Pair(mean, rest)
    m = between(old, new, kept, share)
    old = Pair(running.variance, running.variance_rest)
    v = between(old, Pair(variance, jnp.zeros_like(variance)), kept, share)
    return Running(m.value, v.value, w.value, m.rest, v.rest, w.rest)


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
        loaded = Running.loaded(learnt.mean, learnt.memory_variance)
        return dataclasses.replace(loaded, mean_rest=learnt.mean_rest)
