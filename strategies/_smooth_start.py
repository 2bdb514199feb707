"""Defines `SmoothStart`, which normalises by a blend of running and batch statistics."""

from ._moments import Moments
from ._running import AbstractRunningStrategy, Running


class SmoothStart(AbstractRunningStrategy):
    r"""Normalises batch $k$ by $h_k + m^k b_k$, and inference by $h_k / w_k$.

    $$h_k = m h_{k-1} + (1 - m) b_k, \quad h_0 = 0, \qquad w_k = 1 - m^k$$

    with $b_k$ the moments of batch $k$, which gets the weight $m^k$ that past batches do not
    have yet. So the first steps are those of `Batch`, and after about $1 / (1 - m)$ steps
    training and inference agree as in `Ema`.

    **Arguments:** `momentum`: $m$, between 0 and 1.

    Suggested by Dipper in https://github.com/patrick-kidger/equinox/issues/659.
    """

    def update(self, batch: Moments, memory: Running) -> tuple[Moments, Running]:
        memory = memory.push(batch, self.momentum)
        used = batch.towards(memory.moments, memory.weight(self.momentum))
        return used, memory
