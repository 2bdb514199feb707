"""Defines `VarianceClip`, which clips the variance of each batch."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from ._base import AbstractStrategy
from ._batch import Batch
from ._moments import Moments
from ._numbers import is_count, number
from ._training_batch import TrainingBatch
from ._wrapper import AbstractWrapper


class VarianceClip(AbstractWrapper):
    r"""Clips each batch's variance, and passes the batch on to the wrapped strategy.

    With $g$ the running variance (of the wrapped strategy's `infer`), it clips the variance of
    each batch after the first `start` to

    $$\left[\, g / c,\;\; c \,(g + \operatorname{mean}_{\text{channels}} g) \,\right].$$

    Both normalisation and memory use the clipped variance, so the running variance grows only
    by a small factor. The mean over channels lets a channel recover from a variance near 0. If
    that mean is at most `eps`, the layer has seen only constants (for example from weights that
    start at 0), and nothing is clipped. The mean of the batch is not clipped. A batch of huge
    variance gets huge outputs and gradients, because it is divided by the square root of the
    clipped variance (measured in `experiments.variance_clipping`).

    **Arguments:**

    - `strategy`: the strategy to wrap, by default `Batch()`. The memory is this strategy's.
    - `ratio`: the constant $c$, greater than 1.
    - `start`: the number of batches (`TrainingBatch.step`) before clipping starts, 1 or more.

    **Raises:** `ValueError` for an invalid `ratio` or `start`, or an invalid or frozen
    `strategy`.

    Ginsburg in https://github.com/BVLC/caffe/issues/3963, with his constants.
    """

    strategy: AbstractStrategy[Any] = Batch()
    ratio: float = eqx.field(default=4.0, static=True, converter=number)
    start: int = eqx.field(default=200, static=True)

    def __check_init__(self):
        if not (isinstance(self.ratio, float) and self.ratio > 1):
            raise ValueError(
                f"ratio={self.ratio!r}: the variance is clipped to within this factor of the "
                "running variance, so it must be a number greater than 1."
            )
        if not is_count(self.start):
            raise ValueError(
                f"start={self.start!r}: there is no running variance before the first batch, "
                "so clipping can start after 1 batch at the earliest; give an int."
            )

    def update(self, batch: TrainingBatch, memory: Any) -> tuple[Moments, Any]:
        running = self.strategy.infer(memory).variance
        low, high = running / self.ratio, self.ratio * (running + running.mean())
        clips = (batch.step >= self.start) & (running.mean() > batch.eps)
        # m2 is clipped, not the variance: a batch within the bounds stays bitwise equal.
        count = batch.count
        m2 = jnp.clip(batch.m2, low * count, high * count)
        clipped = dataclasses.replace(batch, m2=jnp.where(clips, m2, batch.m2))
        return self.strategy.update(clipped, memory)
