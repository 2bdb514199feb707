"""Defines `Running`, the memory of most strategies, and the base classes of such strategies."""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Inexact

from eqx_norm._jax.constants import full

from ._base import AbstractStrategy
from ._moments import Moments, select
from ._numbers import Scalar, array_hint, cast, number, real_dtype
from ._pair import Pair, Words, clip_infinity, lerp, stack_by_selection

# MANY batches have the weight 1 for any momentum up to 1 - 1e-10. The number is finite, because
# averages of states, for target networks for example, may multiply it by 0.
MANY = 2.0**40


class Running(NamedTuple):
    r"""Holds the debiased exponential moving average of batch means and variances.

    With $b_k$ the mean and variance of batch $k$, $m$ the momentum, and $w_k = 1 - m^k$ the
    total weight of the batches, the average is

    $$r_k = \frac{m w_{k-1}}{w_k} r_{k-1} + \frac{1 - m}{w_k} b_k = \frac{h_k}{w_k}, \qquad
      h_k = m h_{k-1} + (1 - m) b_k, \quad h_0 = 0.$$

    The first batch is remembered to the bit, and statistics that do not change stay the same
    to the bit. Before any batch it holds mean 0 and variance 1, as inference uses them. So
    users can average states leaf by leaf, also the state of an untrained model
    (https://github.com/huggingface/pytorch-image-models/issues/1182).

    **Fields:** `averages`, `(2, channels)`: $r_k$ of means and of variances, a `Pair`, because
    at a momentum of 0.99 a single float would stop changing while the variance is still wrong
    by 3e-6; `batches`, `()`: $k$, a float; $2^{40}$ for loaded statistics. ($k$ is stored,
    because a sum of weights would stop short of 1 for $m = 0.9999$; $1 - m^k$ does not.)
    """

    # Both averages are in one array, because XLA compiles the arithmetic of an array once.
    averages: Pair
    batches: Float[Array, "*members"]

    @staticmethod
    def empty(channels: int, dtype: DTypeLike) -> "Running":
        """Returns the average before any batch, mean 0 and variance 1; `dtype` is that of the
        mean."""
        mean_and_variance = np.reshape([0, 0, 1, 0], (2, 2, 1))
        averages = Pair(full((2, 2, channels), mean_and_variance, dtype))
        return Running(averages, full((), 0, real_dtype(dtype)))

    @staticmethod
    def loaded(
        mean: ArrayLike | Pair, variance: ArrayLike | Pair, batches: ArrayLike = MANY
    ) -> "Running":
        """Returns statistics from elsewhere, `(channels,)`, as the average of that number of
        batches; by default their weight is 1."""
        mean, variance = Pair.of(mean), Pair.of(variance)
        dtype = mean.parts.dtype
        variance = Pair(cast("variance", variance.parts, dtype))
        averages = Pair.of(*_stacked(*mean.words(dtype), *variance.words(dtype)))
        return Running(averages, jnp.asarray(batches, real_dtype(dtype)))

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
        """Returns the average of the variances, rounded to one float; 1 before any batch, also
        for a memory of an earlier version, which began with 0."""
        variance = self.averages.value[..., 1, :].real
        return jnp.where(jnp.expand_dims(self.batches, -1) > 0, variance, 1)

    def weight(self, momentum: Scalar) -> Float[Array, "*members"]:
        """Returns the weight of all batches, $w_k$."""
        log = math.log if isinstance(momentum, float) else jnp.log
        return -jnp.expm1(self.batches * log(momentum))

    def at_momentum(self, old: float, new: float) -> "Running":
        """Returns the average for another momentum, with the number of batches that has the
        same weight $w_k$. So later batches continue $h$ and $w$."""
        batches = jnp.minimum(self.batches * (math.log(old) / math.log(new)), MANY)
        return self._replace(batches=jnp.where(self.batches < MANY, batches, self.batches))

    def push(self, batch: Moments, momentum: Scalar) -> "Running":
        """Returns the average after one more batch; it uses the batch's `memory_variance`. The
        momentum may be an array, as of a schedule."""
        # The variance is computed outside of the compiled call, so that a program run op by op
        # divides: inside of a larger program XLA may multiply by a reciprocal instead.
        variance = clip_infinity(batch.memory_variance)
        push = _push_at_once if isinstance(momentum, float) else _push
        return push(self, batch.mean_pair, variance, momentum)

    @property
    def moments(self) -> Moments:
        """Returns the average as moments; before any batch, mean 0 and variance 1."""
        return Moments.of(self.mean_pair, self.variance)


def _push(
    running: Running, mean: Pair, variance: Float[Array, "*members channels"], momentum: Scalar
) -> Running:
    dtype = mean.parts.dtype
    variance = variance.astype(dtype)
    new = _stacked(*mean.words(dtype), variance, jnp.zeros_like(variance))
    # The first batch starts from itself.
    old = select(running.batches > 0, running.averages.words(dtype), new)
    batches = jnp.asarray(running.batches + 1, real_dtype(dtype))
    after = running._replace(batches=batches)
    # Start, end and share of the end, before the shares are divided by their sum.
    from_new = new, old, momentum * running.weight(momentum)
    from_old = old, new, 1 - momentum
    # The sum starts from the average with the larger share.
    if not isinstance(momentum, float):
        start, end, share = select(momentum < 0.5, from_new, from_old)
    elif momentum < 0.5:
        start, end, share = from_new
    else:
        start, end, share = from_old
    return after._replace(averages=lerp(start, end, share / after.weight(momentum)))


def _stacked(
    mean_hi: Inexact[Array, "*members channels"],
    mean_lo: Inexact[Array, "*members channels"],
    variance_hi: Inexact[Array, "*members channels"],
    variance_lo: Inexact[Array, "*members channels"],
) -> Words:
    """Returns values and rests of the averages of a `Running`."""
    return stack_by_selection(mean_hi, variance_hi), stack_by_selection(mean_lo, variance_lo)


# Run op by op, this is one call. `inline` saves the time that XLA takes to inline calls.
_push_at_once = jax.jit(_push, static_argnums=3, inline=True)


class AbstractAveragingStrategy(AbstractStrategy[Running]):
    """Remembers a `Running` and normalises inference by it."""

    def init(self, channels: int, dtype: DTypeLike) -> Running:
        return Running.empty(channels, dtype)

    def infer(self, memory: Running) -> Moments:
        return memory.moments

    def load(self, learnt: Moments) -> Running:
        return Running.loaded(learnt.mean_pair, learnt.memory_variance)


class AbstractRunningStrategy(AbstractAveragingStrategy):
    """Remembers a `Running` with a momentum; the base of most strategies.

    **Arguments:** `momentum`: the weight $m$ of the past, strictly between 0 and 1.
    """

    momentum: float = eqx.field(default=0.99, static=True, converter=number)

    def __check_init__(self):
        if not (isinstance(self.momentum, float) and 0 < self.momentum < 1):
            raise ValueError(
                f"momentum={self.momentum!r}: it is the weight of the past in the running "
                "statistics, a number strictly between 0 and 1. (PyTorch's momentum is the "
                "weight of the new batch: its 0.1 is 0.9 here. For a schedule, change it "
                "between steps: eqx_norm.models.reconfigure(model, state, momentum=...).)"
                + array_hint(self.momentum)
            )
