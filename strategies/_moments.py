"""Defines `Moments`, which summarise a set of values, and how two of them are merged."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact

from ._pair import Pair, between, rounded, two_sum


class Moments(eqx.Module):
    r"""Holds count, mean and sum of squared deviations of a set of values, per channel.

    $$\text{count} = n, \qquad \text{mean} = \frac{1}{n} \sum_i x_i, \qquad
      \text{m2} = \sum_i |x_i - \text{mean}|^2.$$

    Sums of squared deviations can be merged without cancellation, which sums of squares
    cannot; with `merge`, moments are a commutative monoid whose neutral element is
    `Moments.zero`. So tiles, shards, micro-batches and whole epochs are combined by one rule.

    **Fields:**

    - `count`: how many values; a scalar, or one number per channel. One that is known while
        tracing is NumPy's: no operation of the program then asks whether it is 0.
    - `mean`: their mean, of shape `(channels,)`, float or complex.
    - `m2`: the sum of the squared distances from the mean, `(channels,)`, always real.
    - `mean_rest`: what rounding has left out of `mean`; 0 unless given. `mean + mean_rest` is
        the mean to twice the precision, and is subtracted from x. (With a mean of 1e6 and a
        standard deviation of 1, a mean in float32 alone puts every output off by 0.03.)
    - `ddof`: 0 or 1, static: subtracted from `count` in `memory_variance`. 0 gives the biased
        variance (Equinox, Flax, Haiku), 1 the unbiased one (PyTorch, cuDNN). The variance
        that normalises a batch is the biased one in all of them.
    """

    count: Float[Any, "*#channels"]
    mean: Inexact[Array, "*channels"]
    m2: Float[Array, "*channels"]
    # Filled in by __post_init__.
    mean_rest: Inexact[Array, "*channels"] = None  # pyright: ignore[reportAssignmentType]
    ddof: int = eqx.field(default=0, static=True)

    def __post_init__(self):
        if self.mean_rest is None:
            self.mean_rest = jnp.zeros_like(self.mean)

    @staticmethod
    def zero(channels: int, dtype: DTypeLike) -> "Moments":
        """Returns the moments of no values at all; `dtype` is the mean's."""
        mean = jnp.zeros((channels,), dtype)
        return Moments(jnp.zeros((), mean.real.dtype), mean, mean.real)

    @staticmethod
    def of(mean: Array, variance: Array, mean_rest: Array | None = None) -> "Moments":
        """Returns moments with this mean and variance; the count, 1, is nominal.

        `mean_rest` is any number that is small beside the mean. Without it, outputs are off by
        the rounding of the mean, divided by the standard deviation.
        """
        rest = jnp.zeros_like(mean) if mean_rest is None else mean_rest
        return Moments(jnp.ones((), variance.dtype), mean, variance, rest)

    @property
    def variance(self) -> Float[Array, "*channels"]:
        """Returns `m2 / count`, the biased variance; 1 where `count` is 0, so that normalising
        by the moments of no values changes nothing."""
        seen = self.count > 0
        if not isinstance(seen, jax.Array) and seen.all():
            return self.m2 / self.count
        return jnp.where(seen, self.m2 / jnp.where(seen, self.count, 1), 1)

    @property
    def memory_variance(self) -> Float[Array, "*channels"]:
        """Returns `m2 / (count - ddof)`, the variance that a running average takes in.

        It is finite even for `count <= ddof`, where this variance does not exist; the layer
        does not remember such a batch.
        """
        return self.m2 / (self.count - self.ddof).clip(min=1)

    def merge(self, other: "Moments") -> "Moments":
        r"""Returns the moments of both sets; associative and commutative but for rounding.

        With $n = n_a + n_b$ and $\delta = \text{mean}_b - \text{mean}_a$,

        $$\text{mean} = \text{mean}_a + \delta \frac{n_b}{n}, \qquad
          \text{m2} = \text{m2}_a + \text{m2}_b + |\delta|^2 \frac{n_a n_b}{n}$$

        (Chan, Golub and LeVeque, 1979). Sets of equal means are merged exactly, and
        merging with `Moments.zero` changes nothing. `ddof` is this one's.
        """
        count = self.count + other.count
        kept, share = (n / jnp.where(count > 0, count, 1) for n in (self.count, other.count))
        delta = (other.mean - self.mean) + (other.mean_rest - self.mean_rest)
        mean = between(self._mean, other._mean, kept, share)
        squared = (delta * delta.conj()).real
        m2 = self.m2 + other.m2 + squared * self.count * share
        return Moments(count, mean.value, m2, mean.rest, self.ddof)

    def pooled(self) -> "Moments":
        r"""Returns the moments of all sets along the first axis, of which there may be many.

        It is `merge` of them all, in as many operations as for two of them: with the mean $k$
        of the first set that is not empty, and $w_j = n_j / n$,

        $$\text{mean} = k + \sum_j w_j (\text{mean}_j - k), \qquad
          \text{m2} = \sum_j \text{m2}_j + n_j |\text{mean}_j - \text{mean}|^2 .$$

        Here, too, sets of equal means are merged exactly, and empty ones change nothing.
        """
        counts = jnp.expand_dims(self.count, range(self.count.ndim, self.mean.ndim))
        seen = counts > 0
        count = counts.sum(0)
        share = (counts / jnp.where(count > 0, count, 1)).astype(self.mean.dtype)
        first = jnp.argmax(seen, axis=0, keepdims=True)
        (k,) = jnp.take_along_axis(self.mean, first, 0)

        def from_mean(mean: Array, rest: Array) -> Array:
            return jnp.where(seen, (self.mean - mean) + (self.mean_rest - rest), 0)

        mean = two_sum(k, rounded((share * from_mean(k, jnp.zeros_like(k))).sum(0)))
        # What the rounding of shares and products has left out.
        more = rounded((share * from_mean(*mean)).sum(0))
        delta = from_mean(mean.value, mean.rest + more)
        m2 = jnp.where(seen, self.m2 + counts * (delta * delta.conj()).real, 0).sum(0)
        value, rest = two_sum(mean.value, mean.rest + more)
        return Moments(count.reshape(self.count.shape[1:]), value, m2, rest, self.ddof)

    def towards(self, other: "Moments", share: Float[ArrayLike, "*#channels"]) -> "Moments":
        """Returns `(1 - share) * self + share * other`, of the mean and of the variance.

        With a share of 0 or 1 it is one of them to the bit. The count is nominal, as in `of`.
        """
        share = jnp.asarray(share, self.m2.dtype)
        mean = between(self._mean, other._mean, 1 - share, share)
        a, b = self.variance, other.variance
        variance = jnp.where(share > 0.5, b + (1 - share) * (a - b), a + share * (b - a))
        return Moments.of(mean.value, variance, mean.rest)

    @property
    def _mean(self) -> Pair:
        return Pair(self.mean, self.mean_rest)

    def astype(self, dtype: DTypeLike) -> "Moments":
        """Returns the moments in another precision; `dtype` is the mean's."""
        real = jnp.zeros((), dtype).real.dtype
        mean, rest = self.mean.astype(dtype), self.mean_rest.astype(dtype)
        return Moments(self.count.astype(real), mean, self.m2.astype(real), rest, self.ddof)

    @property
    def finite(self) -> Bool[Array, ""]:
        """Returns one boolean: whether every channel's mean and m2 are finite."""
        bad = ~(jnp.isfinite(self.mean) & jnp.isfinite(self.m2))
        # Counted, not `all`: `jet` knows sums.
        return bad.sum() == 0
