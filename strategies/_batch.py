"""`batch`: normalise by the batch itself."""

import equinox as eqx

from ._moments import Moments
from ._running import AbstractRunningStrategy, Running


class Batch(AbstractRunningStrategy):
    r"""Training batch $k$ is normalised by its own moments $b_k$, inference by $h_k / w_k$.

    The usual batch normalisation of PyTorch, Flax and Haiku, and the one to start with:
    gradients see the whole of the normalisation, and training does not depend on the
    momentum at all.

    Ioffe and Szegedy, "Batch Normalization", https://arxiv.org/abs/1502.03167.
    """

    momentum: float = eqx.field(default=0.99, static=True)

    def update(self, batch: Moments, memory: Running) -> tuple[Moments, Running]:
        return batch, memory.push(batch, self.momentum)
