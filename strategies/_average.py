"""`Average`: normalise by the batch itself, and remember the average of all batches."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from ._base import AbstractStrategy
from ._moments import Moments
from ._pair import Pair, between, rounded
from ._running import Running
from ._training_batch import TrainingBatch


class Average(AbstractStrategy[Running]):
    r"""Training batch $k$ is normalised by its own moments $b_k$, inference by their average.

    $$r_k = r_{k-1} + \frac{b_k - r_{k-1}}{k} = \frac{1}{k} \sum_{j \le k} b_j,$$

    of the means and of the variances, every batch with the same weight. This is PyTorch's
    `BatchNorm(momentum=None)`, its cumulative moving average. There is no momentum to choose,
    and the weight of early batches falls off as 1/k only.

    The $k$ is the layer's: `TrainingBatch.step`, the number of batches that its memory has
    taken in (`accepted_index`), plus one. So statistics that were learnt elsewhere over so
    many batches are continued where that number is set beside them, as `from_torch` does;
    left at 0, they are replaced by the first batch, as PyTorch's are.

    https://pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html
    """

    def init(self, channels: int, dtype: DTypeLike) -> Running:
        return Running.empty(channels, dtype)

    def update(self, batch: TrainingBatch, memory: Running) -> tuple[TrainingBatch, Running]:
        seen = batch.step.astype(memory.weight.dtype)
        kept, share = seen / (seen + 1), 1 / (seen + 1)
        old, new = Pair(memory.mean, memory.mean_rest), Pair(batch.mean, batch.mean_rest)
        mean = between(old, new, kept, share)
        variance = rounded(batch.memory_variance)
        old, new = (
            Pair(memory.variance, memory.variance_rest),
            Pair(variance, jnp.zeros_like(variance)),
        )
        variance = between(old, new, kept, share)
        one = jnp.ones_like(memory.weight)
        learnt = Running(mean.value, variance.value, one, mean.rest, variance.rest)
        return batch, learnt

    def infer(self, memory: Running) -> Moments:
        return memory.moments

    def load(self, learnt: Moments) -> Running:
        loaded = Running.loaded(learnt.mean, learnt.memory_variance)
        return dataclasses.replace(loaded, mean_rest=learnt.mean_rest)
