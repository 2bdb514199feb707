"""Defines `Batch`, which normalises by the statistics of the batch."""

from ._moments import Moments
from ._running import AbstractRunningStrategy, Running


class Batch(AbstractRunningStrategy):
    r"""Normalises batch $k$ by its own moments $b_k$, and inference by the running average.

    $$\frac{h_k}{w_k}, \quad h_k = m h_{k-1} + (1 - m) b_k, \quad h_0 = 0, \quad w_k = 1 - m^k$$

    PyTorch, Flax and Haiku do the same. Start with this strategy: gradients take the whole
    normalisation into account, and training does not depend on the momentum.

    **Arguments:** `momentum`: $m$, between 0 and 1.

    Ioffe and Szegedy, "Batch Normalization", https://arxiv.org/abs/1502.03167.
    """

    def update(self, batch: Moments, memory: Running) -> tuple[Moments, Running]:
        return batch, memory.push(batch, self.momentum)
