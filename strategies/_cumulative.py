"""Defines `Cumulative`, which remembers the moments of all values seen."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ._base import AbstractStrategy
from ._moments import Moments
from ._pair import Pair, between, rounded, two_sum
from ._training_batch import TrainingBatch


class Seen(eqx.Module):
    """Holds the moments of all values seen, and rounding errors: float32 counts up to 2^24.

    **Fields:** `moments`: `count`, `()`, `mean` and `m2`, `(channels,)`; `count_rest` and
    `m2_rest`: the rounding errors of `count` and `m2`, of their shapes.
    """

    moments: Moments
    count_rest: Float[Array, ""]
    m2_rest: Float[Array, " channels"]


class Cumulative(AbstractStrategy[Seen]):
    r"""Normalises training batches by their own moments, and inference by those of all values.

    After batches of $n_k$ values with means $\mu_k$ and variances $\sigma_k^2$ these are

    $$\mu = \frac{1}{n} \sum_k n_k \mu_k, \qquad
      \sigma^2 = \frac{1}{n} \sum_k n_k \left(\sigma_k^2 + (\mu_k - \mu)^2\right), \qquad
      n = \sum_k n_k.$$

    So the result does not depend on how the values are cut into batches; batches of one value
    work, too. (`Average` gives each batch the same weight, and ignores the variance between
    batches.) Batches are merged in pairs of floats (Chan, Golub and LeVeque, 1979).
    `eqx_norm.models.recalibrate` uses this strategy.
    """

    def init(self, channels: int, dtype: DTypeLike) -> Seen:
        zero = Moments.zero(channels, dtype)
        return Seen(zero, jnp.zeros_like(zero.count), jnp.zeros_like(zero.m2))

    def update(self, batch: TrainingBatch, memory: Seen) -> tuple[TrainingBatch, Seen]:
        old = memory.moments
        count = two_sum(old.count, batch.count + memory.count_rest)
        n = jnp.where(count.value > 0, count.value, 1)
        kept, share = rounded(old.count / n), rounded(batch.count / n)
        before, new = Pair(old.mean, old.mean_rest), Pair(batch.mean, batch.mean_rest)
        mean = between(before, new, kept, share)
        delta = (new.value - before.value) + (new.rest - before.rest)
        apart = (delta * delta.conj()).real * old.count * share
        m2 = two_sum(old.m2, rounded(batch.m2 + apart) + memory.m2_rest)
        moments = Moments(count.value, mean.value, m2.value, mean.rest)
        return batch, Seen(moments, count.rest, m2.rest)

    def infer(self, memory: Seen) -> Moments:
        return memory.moments

    def load(self, learnt: Moments) -> Seen:
        moments = Moments(learnt.count, learnt.mean, learnt.m2, learnt.mean_rest)
        return Seen(moments, jnp.zeros_like(learnt.count), jnp.zeros_like(learnt.m2))
