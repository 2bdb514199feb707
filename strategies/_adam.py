"""`adam`: normalise by the running average, debiased as Adam debiases its averages."""

import equinox as eqx

from ._moments import Moments
from ._running import AbstractRunningStrategy, Running


class Adam(AbstractRunningStrategy):
    r"""Training and inference are both normalised by the debiased average $h_k / w_k$.

    The first batch counts no more than its share, where `ema` starts from the first batch
    alone. It helps, but the early averages still lag behind a network that changes quickly,
    and the gradients of the first steps still spike.

    Suggested by Kidger in https://github.com/patrick-kidger/equinox/issues/659; the
    correction is that of Kingma and Ba, https://arxiv.org/abs/1412.6980.
    """

    momentum: float = eqx.field(default=0.99, static=True)

    def update(self, batch: Moments, memory: Running) -> tuple[Moments, Running]:
        memory = memory.push(batch, self.momentum)
        return memory.moments, memory
