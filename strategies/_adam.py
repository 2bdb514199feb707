"""Defines `Adam`, which normalises by a running average, debiased as in Adam."""

from ._moments import Moments
from ._running import AbstractRunningStrategy, Running


class Adam(AbstractRunningStrategy):
    r"""Normalises by the debiased running average, in training and in inference.

    $$\frac{h_k}{w_k}, \quad h_k = m h_{k-1} + (1 - m) b_k, \quad h_0 = 0, \quad w_k = 1 - m^k$$

    with $b_k$ the moments of batch $k$. `Ema` starts from the first batch; here the first batch
    gets no more than its share. But early averages still lag behind a network that changes
    quickly, so the gradients of the first steps still spike.

    **Arguments:** `momentum`: $m$, between 0 and 1.

    Suggested by Kidger in https://github.com/patrick-kidger/equinox/issues/659; debiasing as in
    Kingma and Ba, https://arxiv.org/abs/1412.6980.
    """

    def update(self, batch: Moments, memory: Running) -> tuple[Moments, Running]:
        memory = memory.push(batch, self.momentum)
        return memory.moments, memory
