"""`variance_clip`: clip the variance of each batch to near the running one."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from ._base import AbstractStrategy
from ._batch import Batch
from ._moments import Moments
from ._training_batch import TrainingBatch
from ._wrapper import AbstractWrapper


class VarianceClip(AbstractWrapper):
    r"""Clips each batch's variance, and hands the batch on to the strategy that it wraps.

    With $g$ the running variance (what the wrapped strategy would use at inference), the
    variance of a batch, after the first `start` of them, is first clipped to

    $$\left[\, g / c,\;\; c \,(g + \operatorname{mean}_{\text{channels}} g) \,\right].$$

    Both the normalisation of this batch and the memory see the clipped variance, so the
    running variance grows by a small factor at most. The average over channels lets a channel
    recover that has been quiet for a long time. Where that average is at most the layer's
    `eps`, the layer has seen constants only (from a network whose last weights start at zero,
    for example); then $g$ says nothing about batches to come, and nothing is clipped. The mean
    is not clipped, and a batch of huge variance divided by a clipped one has huge outputs and
    gradients (measured in `experiments.variance_clipping`).

    **Arguments:**

    - `strategy`: the strategy to wrap; `Batch()` unless given.
    - `ratio`: the constant $c$, greater than 1.
    - `start`: the number of batches to learn from before clipping starts, 1 or more.

    Its memory is that of the wrapped strategy; batches are counted by the layer, as
    `TrainingBatch.step`.

    Ginsburg in https://github.com/BVLC/caffe/issues/3963, with his constants.
    """

    strategy: AbstractStrategy[Any] = Batch()
    ratio: float = eqx.field(default=4.0, static=True)
    start: int = eqx.field(default=200, static=True)

    def __check_init__(self):
        if not self.ratio > 1:
            raise ValueError(
                f"ratio={self.ratio!r}: the variance is kept within a factor of `ratio` of "
                "the running variance, so it must be greater than 1."
            )
        if self.start < 1:
            raise ValueError(
                f"start={self.start!r}: there is no running variance to clip to before the "
                "first batch, so clipping can start after 1 batch at the earliest."
            )

    def update(self, batch: TrainingBatch, memory: Any) -> tuple[Moments, Any]:
        running = self.strategy.infer(memory).variance
        low, high = running / self.ratio, self.ratio * (running + running.mean())
        clips = (batch.step >= self.start) & (running.mean() > batch.eps)
        # m2 is clipped and not the variance, so that a batch within the bounds stays as it is
        # to the bit.
        m2 = jnp.clip(batch.m2, low * batch.count, high * batch.count)
        clipped = dataclasses.replace(batch, m2=jnp.where(clips, m2, batch.m2))
        return self.strategy.update(clipped, memory)
