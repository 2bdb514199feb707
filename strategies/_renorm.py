"""Defines `Renorm` (Batch Renormalisation), and `Ramp`, a schedule for its bounds."""

import dataclasses
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Inexact, Int

from ._moments import Moments
from ._numbers import number
from ._pair import clip_infinity
from ._running import AbstractRunningStrategy, Running
from ._training_batch import TrainingBatch

Schedule = Callable[[Int[Array, ""]], Float[ArrayLike, ""]]


class Ramp(eqx.Module):
    r"""Returns `start` until step `begin`, `end` from step `finish` on, and a line in between.

    $$\text{start} + (\text{end} - \text{start}) \operatorname{clip}\big(
      \tfrac{\text{step} - \text{begin}}{\text{finish} - \text{begin}}, 0, 1\big)$$

    Ramps compare by value, so that layers with equal ramps share a compiled function.

    **Arguments:** `start`, `end`: floats; `begin`, `finish`: ints, numbers of batches.
    """

    start: float = eqx.field(static=True, converter=number)
    end: float = eqx.field(static=True, converter=number)
    begin: int = eqx.field(static=True)
    finish: int = eqx.field(static=True)

    def __check_init__(self):
        ends, steps = (self.start, self.end), (self.begin, self.finish)
        are_numbers = all(isinstance(end, float) and math.isfinite(end) for end in ends)
        are_steps = all(isinstance(step, int | np.integer) for step in steps)
        if not (are_numbers and are_steps and self.begin < self.finish):
            raise ValueError(
                f"{self}: it goes from start= at step begin= to end= at step finish=. Give "
                "finite numbers for start= and end=, and two ints, begin= the smaller one."
            )

    def __call__(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Returns the value at this step."""
        done = (step - self.begin) / (self.finish - self.begin)
        return self.start + (self.end - self.start) * jnp.clip(done, 0.0, 1.0)


class Renorm(AbstractRunningStrategy):
    r"""Normalises by the moments of the batch, corrected towards the running average.

    With $\mu_B, \sigma_B$ the mean of the batch and the root of its variance plus `eps`, and
    $\mu, \sigma$ those of the debiased running average before this batch,

    $$\hat x = \frac{x - \mu_B}{\sigma_B} r + d, \qquad
      r = \operatorname{clip}\big(\tfrac{\sigma_B}{\sigma},
        \tfrac{1}{r_{\max}}, r_{\max}\big), \qquad
      d = \operatorname{clip}\big(\tfrac{\mu_B - \mu}{\sigma}, -d_{\max}, d_{\max}\big),$$

    where $r$ and $d$ are constants to the gradient. If neither is clipped, $\hat x$ is the
    result of inference with these running statistics. With $r_{\max} = 1$ and $d_{\max} = 0$,
    and on the first batch, $\hat x$ is that of `Batch` to the bit. Inference is as in `Batch`.

    **Arguments:**

    - `momentum`: of the running average, as for `Batch`.
    - `r_max`, `d_max`: numbers, or functions of `TrainingBatch.step`, the number of batches
        remembered so far. The defaults are the paper's: 1 and 0 for 5,000 batches, then
        linearly to 3 at 40,000 and to 5 at 25,000. Scale them to the length of your run.

    **Raises:** `ValueError` for an `r_max` below 1 or a `d_max` below 0, at step 0 if it is a
    function; at later steps such values count as 1 and 0, which is no correction.

    Ioffe, "Batch Renormalization", https://arxiv.org/abs/1702.03275.
    """

    r_max: float | Schedule = eqx.field(
        default=Ramp(1, 3, 5_000, 40_000), static=True, converter=number
    )
    d_max: float | Schedule = eqx.field(
        default=Ramp(0, 5, 5_000, 25_000), static=True, converter=number
    )

    @classmethod
    def crossq(cls, momentum: float = 0.99) -> "Renorm":
        """Returns the strategy with CrossQ's bounds: 1 and 0 for 100,000 batches, then 3 and 5.

        Bhatt et al., "CrossQ", https://arxiv.org/abs/1902.05605.
        """
        return cls(momentum, Ramp(1, 3, 99_999, 100_000), Ramp(0, 5, 99_999, 100_000))

    def __check_init__(self):
        for name, least in (("r_max", 1), ("d_max", 0)):
            bound = getattr(self, name)
            ends = (bound.start, bound.end) if isinstance(bound, Ramp) else (bound,)
            # The step is a NumPy number, because an array would start JAX.
            ends = [number(end(np.int32(0))) if callable(end) else end for end in ends]
            if not all(isinstance(end, float) and end >= least for end in ends):
                raise ValueError(
                    f"{name}={bound!r}: it bounds the correction of a batch, and must be a "
                    f"number of {least} or more ({least}: no correction), or a function of the "
                    f"step that returns one. It gives {', '.join(map(repr, ends))}."
                )

    @property
    def starts_as_batch(self) -> bool:
        with jax.ensure_compile_time_eval():
            bounds = [f(jnp.int32(0)) if callable(f) else f for f in (self.r_max, self.d_max)]
            return bounds == [1, 0]

    def update(self, batch: TrainingBatch, memory: Running) -> tuple[Moments, Running]:
        r_max = self._bound(self.r_max, 1, batch)
        d_max = self._bound(self.d_max, 0, batch)
        running, is_first = memory.moments, memory.batches == 0
        sigma_b = jnp.sqrt(clip_infinity(batch.variance) + batch.eps)
        sigma = jnp.sqrt(running.variance + batch.eps)
        r = jnp.clip(sigma_b / sigma, 1 / r_max, r_max)
        distance = (batch.mean_pair - running.mean_pair).value
        clipped = _clip_abs(distance, d_max * sigma)
        # The mean is shifted by d sigma_b / r, exactly `distance` if neither is clipped.
        shift = clipped * (sigma_b / sigma / r).astype(distance.dtype)
        # No correction of the first batch.
        r, shift = jnp.where(is_first, 1, r), jnp.where(is_first, 0, shift)
        return _corrected(batch, sigma_b, r, shift), memory.push(batch, self.momentum)

    @staticmethod
    def _bound(bound: float | Schedule, least: int, batch: TrainingBatch) -> Float[Array, ""]:
        value = bound(batch.step) if callable(bound) else bound
        return jnp.maximum(jnp.asarray(value, batch.m2.dtype), least)


def _clip_abs(
    values: Inexact[Array, " channels"], bound: Float[Array, " channels"]
) -> Inexact[Array, " channels"]:
    """Returns values, float or complex, with absolute values of at most `bound`."""
    limit = bound.astype(values.dtype)
    is_far = jnp.abs(values) > jnp.abs(limit)
    return jnp.where(is_far, jnp.sign(values) * limit, values)


def _corrected(
    batch: TrainingBatch,
    sigma_b: Float[Array, " channels"],
    r: Float[Array, " channels"],
    shift: Inexact[Array, " channels"],
) -> Moments:
    """Returns the moments by which the layer divides x by `sigma_b / r`, after subtracting
    `mean_b - shift`; r and `shift / sigma_b` are constants to the gradient, sigma_b is not."""
    r, shift = lax.stop_gradient((r, shift))
    sigma_ratio = (sigma_b / lax.stop_gradient(sigma_b)).astype(shift.dtype)  # 1
    # With this m2 the layer, which adds eps, divides x by sigma_b / r.
    shrunk = 1 / (r * r)
    m2 = batch.m2 * shrunk + batch.count * batch.eps * (shrunk - 1)
    mean = batch.mean_pair - shift * sigma_ratio
    return dataclasses.replace(batch.moments, m2=m2, mean_pair=mean)
