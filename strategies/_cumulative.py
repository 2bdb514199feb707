"""Defines `Cumulative`, which remembers the moments of all values seen."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike

from eqx_norm._jax.arithmetic import uncontracted

from ._base import AbstractStrategy
from ._moments import Moments, abs_squared
from ._numbers import real_dtype
from ._pair import Pair
from ._training_batch import TrainingBatch


class Seen(eqx.Module):
    """Holds the moments of all values seen, to twice the precision: float32 counts up to 2^24.

    **Fields:** `count_pair`, `(1,)`; `mean_pair` and `m2_pair`, `(channels,)`.
    """

    count_pair: Pair = eqx.field(converter=Pair.of)
    mean_pair: Pair = eqx.field(converter=Pair.of)
    m2_pair: Pair = eqx.field(converter=Pair.of)

    @property
    def moments(self) -> Moments:
        """Returns the moments, with count and m2 rounded to one float."""
        return Moments(self.count_pair.value[..., 0], self.mean_pair, self.m2_pair.value)


class Cumulative(AbstractStrategy[Seen]):
    r"""Normalises training batches by their own moments, and inference by all values' moments.

    After batches of $n_k$ values with means $\mu_k$ and variances $\sigma_k^2$, the latter are

    $$\mu = \frac{1}{n} \sum_k n_k \mu_k, \qquad
      \sigma^2 = \frac{1}{n} \sum_k n_k \left(\sigma_k^2 + (\mu_k - \mu)^2\right), \qquad
      n = \sum_k n_k.$$

    So the result does not depend on how the values are cut into batches; batches of one value
    work, too. (`Average` gives each batch the same weight, and ignores the variance between
    batches.) Batches are merged in pairs of floats (Chan, Golub and LeVeque, 1979).
    `eqx_norm.models.recalibrate` uses this strategy.
    """

    def init(self, channels: int, dtype: DTypeLike) -> Seen:
        mean, m2 = (Pair.zero((channels,), each) for each in (dtype, real_dtype(dtype)))
        return Seen(Pair.zero((1,), real_dtype(dtype)), mean, m2)

    def update(self, batch: TrainingBatch, memory: Seen) -> tuple[Moments, Seen]:
        before = memory.count_pair
        count = before + batch.count
        total = jnp.where(count.value > 0, count.value, 1)
        share = uncontracted(jnp.divide(batch.count, total))
        delta = (batch.mean_pair - memory.mean_pair).value
        between = abs_squared(delta) * before.value * share
        mean = memory.mean_pair.towards(batch.mean_pair, share)
        return batch, Seen(count, mean, memory.m2_pair + (batch.m2 + between))

    def infer(self, memory: Seen) -> Moments:
        return memory.moments

    def load(self, learnt: Moments) -> Seen:
        if learnt.known_count.ndim:
            raise ValueError(
                f"The moments have counts of shape {learnt.known_count.shape}, but Cumulative "
                "has one count for all channels: give one number of values."
            )
        return Seen(learnt.known_count, learnt.mean_pair, learnt.m2)
