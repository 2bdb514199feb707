"""Computes the recursion of each strategy in NumPy, in extended precision.

Every mean and variance is a *number* a + b s + c t + d st with s^2 = t^2 = 0, an array
(4, directions s, ...). Thus f(x + v s + w t) has the derivatives of f at x along v, along w,
and along both, which tests/oracle.py needs. Axes of size 1 are broadcast.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from eqx_norm import strategies

LD = np.longdouble
STRATEGIES: dict[str, Callable[[float], Any]] = {  # functions of the momentum
    "batch": strategies.Batch,
    "ema": strategies.Ema,
    "adam": strategies.Adam,
    "smooth_start": strategies.SmoothStart,
    "renorm": lambda m: strategies.Renorm(
        m, r_max=strategies.Ramp(1, 2, 0, 4), d_max=strategies.Ramp(0, 1, 0, 4)
    ),
    "clip": lambda m: strategies.VarianceClip(strategies.Ema(m), ratio=1.5, start=1),
    "average": lambda _: strategies.Average(),
    "cumulative": lambda _: strategies.Cumulative(),
    "accumulated": lambda m: strategies.Accumulated(strategies.Adam(m), every=2),
    "frozen": lambda m: strategies.Frozen(strategies.Batch(m)),
}


def number(a: Any, s: Any = 0, t: Any = 0) -> Any:
    return np.stack(np.broadcast_arrays(np.asarray(a)[None], s, t, LD(0)))


def constant(a: float, like: Any) -> Any:
    return number(np.full(like.shape[2:], LD(a)))


def value(a: Any) -> Any:
    return a[0, 0]


def times(a: Any, b: Any) -> Any:
    both = a[0] * b[3] + a[3] * b[0] + a[1] * b[2] + a[2] * b[1]
    return np.stack([a[0] * b[0], *(a[0] * b[i] + a[i] * b[0] for i in (1, 2)), both])


def squared(a: Any) -> Any:
    """Returns the square of the absolute value."""
    return times(a, a.conj()).real


def chained(a: Any, f: Any, slope: Any, bend: Any) -> Any:
    """Returns f(a), given the value, the first and the second derivative of f at a."""
    return np.stack([f, slope * a[1], slope * a[2], slope * a[3] + bend * a[1] * a[2]])


def rsqrt(a: Any) -> Any:
    r = 1 / np.sqrt(a[0])
    return chained(a, r, r**3 / -2, r**5 * 3 / 4)


class Moments(NamedTuple):
    n: Any  # the number of values; of batches in a running average
    mean: Any  # a *number*, like the variance
    variance: Any

    def moved(self, to: "Moments", share: Any, union: bool = False) -> "Moments":
        """Returns these moments, moved towards `to` by a share; those of `to` if n is 0. The
        variance of a union includes that between both means."""
        pairs = zip(self[1:], to[1:], strict=True)
        mean, variance = (np.where(self.n == 0, number(value(b)), a) for a, b in pairs)
        between = union * share * (1 - share) * squared(to.mean - mean)
        variance = variance + share * (to.variance - variance) + between
        n = self.n + (to.n if union else 1)
        return Moments(n, mean + share * (to.mean - mean), variance)


class Memory(NamedTuple):
    running: Moments
    steps: Any  # the number of batches so far
    pending: Moments  # of the micro-batches so far
    waiting: Any  # the number of these micro-batches

    @classmethod
    def empty(cls, *shape: int) -> "Memory":
        """Returns the memory before any batch: mean 0 and variance 1."""
        zero = np.zeros(shape, LD)
        nothing = Moments(zero, number(zero), number(zero))
        return cls(nothing._replace(variance=number(zero + 1)), zero, nothing, zero)


def chosen(condition: Any, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: np.where(condition, a, b), one, other)


def unbiased(case: Any, moments: Moments) -> Moments:
    """Returns the moments with the variance that a layer remembers."""
    n = np.maximum(moments.n, 1)
    ratio = n / np.maximum(n - case.unbiased, 1)
    return moments._replace(variance=moments.variance * ratio)


def reference(case: Any, memory: Memory, batch: Moments) -> tuple[Moments, Memory]:
    """Returns the moments that normalise a batch, and the memory after the batch.

    `case.approach` is a name in `STRATEGIES`; the case has also its momentum, and the layer's
    eps, unbiased and spatial axes, which come after the channels (groups, 1).
    """
    kind, m, eps = case.approach, LD(case.momentum), constant(case.eps, batch.variance)
    (running, step, pending, waiting), k = memory, memory.running.n
    if kind == "clip":
        g, now = running.variance, value(batch.variance)
        whole = g.mean(-2 - len(case.spatial), keepdims=True)  # of all channels
        low, high = g / LD(1.5), LD(1.5) * (g + whole)
        clips = (step >= 1) & (value(whole) > case.eps)
        clipped = np.where(clips & (now < value(low)), low, batch.variance)
        clipped = np.where(clips & (now > value(high)), high, clipped)
        kind, batch = "ema", batch._replace(variance=clipped)
    share = {
        "ema": np.where(k == 0, 1, 1 - m),
        "average": 1 / (step + 1),
        "cumulative": batch.n / np.maximum(k + batch.n, 1),
    }.get(kind, (1 - m) / (1 - m ** (k + 1)))

    def learn(batch: Moments) -> Moments:
        if kind == "cumulative":
            return running.moved(batch, share, union=True)
        return running.moved(unbiased(case, batch), share)

    after = used = learn(batch)
    if kind == "accumulated":
        of_batch = batch.n / np.maximum(pending.n + batch.n, 1)
        whole = pending.moved(batch, of_batch, union=True)
        last = Memory(learn(whole), step + 1, *jax.tree.map(np.zeros_like, (pending, waiting)))
        return used, chosen(waiting == 1, last, Memory(running, step, whole, waiting + 1))
    if kind == "smooth_start":
        used = batch._replace(n=batch.n + 1).moved(after, 1 - m ** (k + 1))
    elif kind == "renorm":
        square, sigma = batch.variance + eps, np.sqrt(value(running.variance) + case.eps)
        of_batch = times(square, rsqrt(square))
        bound = np.minimum(step / 4, 1)  # of d; that of r is 1 larger
        r = np.clip(value(of_batch) / sigma, 1 / (1 + bound), 1 + bound)
        d = value(batch.mean - running.mean) / sigma
        d = np.where(np.abs(d) > bound, bound * np.sign(d), d)
        used = Moments(batch.n, batch.mean - of_batch * (d / r), square / r**2 - eps)
    elif kind not in ("ema", "adam"):
        used = batch
    return used, memory._replace(running=after, steps=step + 1)
