"""`smooth_start`: normalise by the running average, filled up with the batch's own."""

import equinox as eqx

from ._moments import Moments
from ._running import AbstractRunningStrategy, Running


class SmoothStart(AbstractRunningStrategy):
    r"""Training batch $k$ is normalised by $h_k + m^k b_k$, inference by $h_k / w_k$.

    The weight $m^k = 1 - w_k$ that the past batches do not fill yet goes to this batch. So
    the first steps are those of `batch`, and after about $1 / (1 - m)$ steps, when the network
    has calmed down, training and inference agree as they do in `ema`.

    Suggested by Dipper in https://github.com/patrick-kidger/equinox/issues/659.
    """

    momentum: float = eqx.field(default=0.99, static=True)

    def update(self, batch: Moments, memory: Running) -> tuple[Moments, Running]:
        memory = memory.push(batch, self.momentum)
        return memory.fill(batch), memory
