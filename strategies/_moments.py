"""Defines `Moments`: count, mean and variance of a set of values, which can be merged."""

import functools
import math
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact

from eqx_norm._jax.constants import full

from ._numbers import Floats, cast, number, real_dtype
from ._pair import Pair, clip_infinity

Tree = TypeVar("Tree")


class Moments(eqx.Module):
    r"""Holds count, mean and sum of squared deviations of a set of values, per channel.

    $$\text{count} = n, \qquad \text{mean} = \frac{1}{n} \sum_i x_i, \qquad
      \text{m2} = \sum_i |x_i - \text{mean}|^2$$

    Sums of squared deviations, unlike sums of squares, can be merged without cancellation.
    `merge` is associative and commutative up to rounding, with the neutral element
    `Moments.zero`, and so combines tiles, devices, micro-batches and epochs.

    **Fields:**

    - `count`: the number of values: a scalar, or an array that has the leading axes of the
        mean, such as `(sets,)`; `None` if it is not known, as of a running average. A count
        known while tracing is NumPy's, and the program then has no operations for 0 values.
    - `mean_pair`: the mean, `(*sets, channels)`, float or complex, to twice the precision: a
        `Pair`, or an array, which becomes a `Pair`. `mean` is the pair's value, an array.
    - `m2`: the sum of squared deviations from the mean, of the shape of the mean, real; the
        variance if `count` is `None`.
    - `ddof`: 0 or 1, static; subtracted from `count` in `variance`. 0 gives the biased variance
        (Equinox, Flax, Haiku), 1 the unbiased one (PyTorch, cuDNN).

    `jax.vmap(moments)`, the members of an ensemble and federated clients give **several sets**,
    with axes in front of the channels. Every method treats each set as if it were alone.

    **Raises:** `ValueError` in methods, for shapes that do not fit.
    """

    count: Floats | None
    mean_pair: Pair = eqx.field(converter=Pair.of)
    m2: Float[Array, "*sets channels"]
    ddof: int = eqx.field(default=0, static=True)

    @staticmethod
    def zero(channels: int | tuple[int, ...], dtype: DTypeLike) -> "Moments":
        """Returns the moments of no values; `channels` may be the shape `(*sets, channels)`;
        `dtype` is that of the mean. The count is a scalar, or of that shape."""
        shape = channels if isinstance(channels, tuple) else (channels,)
        count_shape = shape if len(shape) > 1 else ()
        count, m2 = (full(each, 0, real_dtype(dtype)) for each in (count_shape, shape))
        return Moments(count, Pair.zero(shape, dtype), m2)

    @staticmethod
    def of(
        mean: ArrayLike | Pair,
        variance: ArrayLike,
        count: ArrayLike | None = None,
        ddof: int = 0,
    ) -> "Moments":
        """Returns moments with this mean, `(*sets, channels)` or a number, and this variance,
        of the shape of the mean or a number.

        `count` is the number of values, above 0: give it if you know it, because `merge`, and
        strategies that weigh by it, need it. With `ddof=1` the variance is the unbiased one.

        If the mean is an array, its rounding error divided by the standard deviation becomes an
        error of the outputs. A `Pair` avoids this error.
        """
        mean = Pair.of(mean)
        # NumPy's function: jax2onnx 0.13 replaces `jnp.shape` while it traces.
        shape, variance_shape = mean.value.shape, np.shape(variance)
        if variance_shape not in ((), shape):
            raise ValueError(
                f"variance has shape {variance_shape}, and the mean {shape}: give a variance "
                "for each mean, or one number."
            )
        real = mean.value.real
        m2 = jnp.full_like(real, cast("variance", variance, real.dtype))
        if count is None:
            return Moments(None, mean, m2, ddof)
        given, count = number(count), cast("count", count, m2.dtype)
        if isinstance(given, float) and not 0 < given < math.inf:
            raise ValueError(f"{given:g} is no number of values: give one above 0, or None.")
        divisor = expand_trailing_axes("count", count, shape)
        if ddof:
            divisor = degrees_of_freedom(divisor, ddof)
        return Moments(count, mean, m2 * divisor, ddof)

    @property
    def mean(self) -> Inexact[Array, "*sets channels"]:
        """Returns the mean, rounded to one float."""
        return self.mean_pair.value

    @property
    def variance(self) -> Float[Array, "*sets channels"]:
        """Returns `m2 / (count - ddof)`; 1 where `count` is 0, so that the moments of no values
        normalise by the identity. It is finite even for a `count` of `ddof`."""
        if self.count is None:
            return self.m2
        count = self._expanded_count
        divisor = degrees_of_freedom(count, self.ddof) if self.ddof else count
        has_values = count > 0
        if not isinstance(has_values, jax.Array) and has_values.all():
            return self.m2 / divisor
        return jnp.where(has_values, self.m2 / jnp.where(has_values, divisor, 1), 1)

    @property
    def memory_variance(self) -> Float[Array, "*sets channels"]:
        """Returns the variance for the running statistics, here `variance`."""
        return self.variance

    @property
    def known_count(self) -> Floats:
        """Returns `count`; raises `ValueError` if it is `None`."""
        if self.count is None:
            raise ValueError(
                "The weight of these moments is the number of their values, which running "
                "averages and PyTorch checkpoints do not hold. Give it, per channel: values=n "
                "in from_torch, reconfigure or swap, or Moments.of(mean, variance, n)."
            )
        return self.count

    @property
    def _expanded_count(self) -> Floats:
        return expand_trailing_axes("count", self.known_count, self.m2.shape)

    def _check_same_shape(self, other: "Moments") -> None:
        if self.m2.shape != other.m2.shape:
            raise ValueError(
                f"These moments have a mean of shape {self.m2.shape}, the others one of "
                f"{other.m2.shape}: give moments of the same channels, and of as many sets."
            )

    def merge(self, other: "Moments") -> "Moments":
        r"""Returns the moments of the union of two sets, with the `ddof` of this one.

        With $n = n_a + n_b$ and $\delta = \text{mean}_b - \text{mean}_a$,

        $$\text{mean} = \text{mean}_a + \delta \frac{n_b}{n}, \qquad
          \text{m2} = \text{m2}_a + \text{m2}_b + |\delta|^2 \frac{n_a n_b}{n}$$

        (Chan, Golub and LeVeque, 1979). Sets of equal means are merged exactly, and merging
        with `Moments.zero` changes nothing. A count that is not known is a `ValueError`.
        """
        self._check_same_shape(other)
        mine, theirs = self._expanded_count, other._expanded_count
        count = mine + theirs
        share = theirs / jnp.where(count > 0, count, 1)
        delta = (other.mean_pair - self.mean_pair).value
        m2 = self.m2 + other.m2 + abs_squared(delta) * mine * share
        mean = self.mean_pair.towards(other.mean_pair, share)
        axes = max(self.known_count.ndim, other.known_count.ndim)
        return Moments(count.reshape(count.shape[:axes]), mean, m2, self.ddof)

    def pooled(self) -> "Moments":
        r"""Returns the moments of all sets along the first axis, merged at once: of shape
        `(channels,)` for a mean of shape `(sets, channels)`, `(1,)` for one of shape `(sets,)`.

        The number of operations does not depend on the number of sets. With the mean $k$ of the
        first set that is not empty, and $w_j = n_j / n$,

        $$\text{mean} = k + \sum_j w_j (\text{mean}_j - k), \qquad
          \text{m2} = \sum_j \text{m2}_j + n_j |\text{mean}_j - \text{mean}|^2 .$$

        As in `merge`, sets of equal means are merged exactly, and empty ones change nothing.
        """
        counts = self._count_of_each_set()
        has_values = counts > 0
        count = counts.sum(0, keepdims=True)
        share = (counts / jnp.where(count > 0, count, 1)).astype(self.mean.dtype)
        first = jnp.argmax(has_values, axis=0, keepdims=True)
        k = jnp.take_along_axis(self.mean, first, 0)

        def distances(mean: Pair) -> Inexact[Array, "*sets channels"]:
            return jnp.where(has_values, (self.mean_pair - mean).value, 0)

        mean = Pair.of(k)
        for _ in range(2):  # the second time for the rounding error of shares and products
            mean += (share * distances(mean)).sum(0, keepdims=True)
        m2 = self.m2 + counts * abs_squared(distances(mean))
        m2 = jnp.where(has_values, m2, 0).sum(0)
        count = count.reshape(self.known_count.shape[1:])
        if m2.ndim == 0:  # one number is a vector of one channel
            return Moments(count, mean, m2[None], self.ddof)
        return Moments(count, Pair(mean.parts[0]), m2, self.ddof)

    def _count_of_each_set(self) -> Floats:
        """Returns the count with as many entries as there are sets, also if they share it."""
        counts = self._expanded_count
        sets = len(self.m2)
        if counts.shape[:1] == (sets,):
            return counts
        return counts * np.ones((sets, *[1] * (self.m2.ndim - 1)), counts.dtype)

    def towards(self, other: "Moments", share: Float[ArrayLike, "..."]) -> "Moments":
        """Returns `(1 - share) * self + share * other`, for the mean and for the variance.

        The share is a scalar, or has the leading axes of the mean. A share of 0 or 1 gives
        `self` or `other` to the bit. The count is not known.
        """
        self._check_same_shape(other)
        share = cast("share", share, self.m2.dtype)
        share = expand_trailing_axes("share", share, self.m2.shape)
        a, b = clip_infinity(self.variance), other.variance
        is_near_b = share > 0.5
        variance = jnp.where(is_near_b, b + (1 - share) * (a - b), a + share * (b - a))
        return Moments.of(self.mean_pair.towards(other.mean_pair, share), variance)

    def astype(self, dtype: DTypeLike) -> "Moments":
        """Returns the moments in another precision; `dtype` is that of the mean."""
        real = real_dtype(dtype)
        mean = self.mean_pair.astype(dtype)
        count = None if self.count is None else self.count.astype(real)
        return Moments(count, mean, self.m2.astype(real), self.ddof)

    @property
    def finite(self) -> Bool[Array, "*sets"]:
        """Returns whether all channels of a set have a finite mean and m2, as one boolean."""
        return (jnp.isfinite(self.mean) & jnp.isfinite(self.m2)).all(-1)


def degrees_of_freedom(count: Floats, ddof: int) -> Floats:
    """Returns `count - ddof`, by which m2 is divided, or 1 if that is less: the variance of one
    value is then 0, and not NaN."""
    return (count - ddof).clip(min=1)


def abs_squared(values: Inexact[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the squares of the absolute values."""
    return (values * values.conj()).real


def expand_trailing_axes(name: str, value: Floats, shape: tuple[int, ...]) -> Floats:
    """Returns numbers of sets, such as a count, with the axes that they lack to broadcast to a
    mean of this shape; raises `ValueError` unless they are a scalar or have leading axes, each
    of the size of the mean's or 1."""
    if value.ndim == 0:
        return value
    sizes = zip(value.shape, shape, strict=False)
    fits = all(size in (1, mean_size) for size, mean_size in sizes)
    if value.ndim > len(shape) or not fits:
        allowed = " or ".join(str(shape[:axes]) for axes in range(len(shape) + 1))
        raise ValueError(
            f"{name} has shape {value.shape}, but for a mean of shape {shape} it is a scalar, "
            f"or has the leading axes of the mean: shape {allowed}."
        )
    return value.reshape(*value.shape, *[1] * (len(shape) - value.ndim))


@functools.partial(jax.jit, inline=True)  # run op by op, `select` is one call
def select(condition: Bool[Array, ""], if_true: Tree, if_false: Tree) -> Tree:
    """Returns one of two pytrees of arrays of the same structure, shapes and dtypes."""
    return jax.tree.map(lambda a, b: lax.select(condition, a, b), if_true, if_false)
