"""Defines `Average`, which remembers the average of the statistics of all batches."""

from ._running import AbstractAveragingStrategy, Running
from ._training_batch import TrainingBatch


class Average(AbstractAveragingStrategy):
    r"""Normalises batch $k$ by its own moments $b_k$, and inference by their average.

    $$r_k = r_{k-1} + \frac{b_k - r_{k-1}}{k} = \frac{1}{k} \sum_{j \le k} b_j$$

    of means and of variances, as PyTorch's `BatchNorm(momentum=None)`. The weight of early
    batches decreases only as 1/k. $k$ is `TrainingBatch.step` plus one, which the layer counts
    (`accepted`). To continue loaded statistics of n batches, set that count to n, as
    `from_torch` and `reconfigure(..., batches=n)` do; if the count is 0 after `from_torch`, the
    first batch replaces them, as in PyTorch.

    https://pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html
    """

    def update(self, batch: TrainingBatch, memory: Running) -> tuple[TrainingBatch, Running]:
        k = batch.step.astype(memory.batches.dtype) + 1
        new = Running.loaded(batch.mean_pair, batch.memory_variance)
        averages = memory.averages.towards(new.averages, 1 / k)
        return batch, new._replace(averages=averages)
