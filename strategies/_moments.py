"""`Moments`: what a set of values is summarised by, and how two summaries become one."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Inexact


class Moments(eqx.Module):
    r"""Count, mean and sum of squared deviations of a set of values, per channel.

    For values $x_1, \dots, x_n$ of one channel,

    $$\text{count} = n, \qquad
      \text{mean} = \frac{1}{n} \sum_i x_i, \qquad
      \text{m2} = \sum_i |x_i - \text{mean}|^2.$$

    Sums of squared deviations can be merged without cancellation, which sums of squares
    cannot; with `merge`, moments are a commutative monoid whose neutral element is
    `Moments.zero`. So tiles, shards, micro-batches and whole epochs are all combined by
    one rule, whatever their counts.

    **Fields:**

    - `count`: how many values; a scalar, or one number per channel.
    - `mean`: their mean, of shape `(channels,)`, float or complex.
    - `m2`: the sum of the squared distances from the mean, `(channels,)`, always real.
    - `mean_rest`: what rounding has left out of `mean`: `mean + mean_rest` is the mean to
        twice the precision, and what normalises; 0 unless given. (With a mean of 1e6 and a
        standard deviation of 1, a mean in float32 alone puts every output off by 0.03.)
    - `ddof`: 0 or 1, static. What a running average subtracts from `count` when it takes
        in the variance of this batch: 0 for the biased variance (Equinox, Flax, Haiku), 1
        for the unbiased one (PyTorch, cuDNN). The variance that normalises a batch is the
        biased one in all of them.
    """

    count: Float[Array, "*#channels"]
    mean: Inexact[Array, "*channels"]
    m2: Float[Array, "*channels"]
    # Filled in by __post_init__.
    mean_rest: Inexact[Array, "*channels"] = None  # pyright: ignore[reportAssignmentType]
    ddof: int = eqx.field(default=0, static=True)

    def __post_init__(self):
        if self.mean_rest is None:
            self.mean_rest = jnp.zeros_like(self.mean)

    @classmethod
    def zero(cls, channels: int, dtype: DTypeLike) -> "Moments":
        """The moments of no values at all; `dtype` is the mean's."""
        mean = jnp.zeros((channels,), dtype)
        return cls(jnp.zeros((), mean.real.dtype), mean, mean.real)

    @classmethod
    def of(
        cls, mean: Inexact[Array, "*channels"], variance: Float[Array, "*channels"]
    ) -> "Moments":
        """Moments with the given mean and variance; the count, 1, is nominal."""
        return cls(jnp.ones((), variance.dtype), mean, variance)

    @property
    def variance(self) -> Float[Array, "*channels"]:
        """`m2 / count`, the biased variance; 1 where `count` is 0.

        (So that normalising by the moments of nothing changes nothing.)
        """
        seen = self.count > 0
        return jnp.where(seen, self.m2 / jnp.where(seen, self.count, 1), 1)

    @property
    def memory_variance(self) -> Float[Array, "*channels"]:
        """`m2 / (count - ddof)`: the variance as a running average takes it in.

        Finite even where there is none (`count <= ddof`, when a mask has left too few values):
        the layer keeps such a batch out of the memory.
        """
        return self.m2 / jnp.maximum(self.count - self.ddof, 1)

    def merge(self, other: "Moments") -> "Moments":
        r"""The moments of both sets together; associative and commutative but for rounding.

        With $n = n_a + n_b$ and $\delta = \text{mean}_b - \text{mean}_a$,

        $$\text{mean} = \text{mean}_a + \delta \frac{n_b}{n}, \qquad
          \text{m2} = \text{m2}_a + \text{m2}_b + |\delta|^2 \frac{n_a n_b}{n}$$

        (Chan, Golub and LeVeque, 1979). Sets of equal means are merged exactly, and
        merging with `Moments.zero` changes nothing. `ddof` is this one's.
        """
        count = self.count + other.count
        share = other.count / jnp.where(count > 0, count, 1)
        high, low = other.mean - self.mean, other.mean_rest - self.mean_rest
        delta = high + low
        squared = (delta * delta.conj()).real
        share = share.astype(delta.dtype)
        mean = self.mean + high * share
        rest = (high * share - (mean - self.mean)) + (self.mean_rest + low * share)
        return Moments(
            count,
            mean,
            self.m2 + other.m2 + squared * self.count * share.real,
            rest,
            self.ddof,
        )

    def astype(self, dtype: DTypeLike) -> "Moments":
        """The same moments in another precision; `dtype` is the mean's."""
        real = jnp.zeros((), dtype).real.dtype
        return Moments(
            self.count.astype(real),
            self.mean.astype(dtype),
            self.m2.astype(real),
            self.mean_rest.astype(dtype),
            self.ddof,
        )

    @property
    def finite(self) -> Bool[Array, ""]:
        """One boolean: whether every channel's mean and m2 are finite."""
        return (jnp.isfinite(self.mean) & jnp.isfinite(self.m2)).all()
