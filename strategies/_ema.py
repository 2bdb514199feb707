"""Defines `Ema`, which normalises by the running average."""

import jax.numpy as jnp

from ._moments import Moments
from ._running import MANY, AbstractRunningStrategy, Running


class Ema(AbstractRunningStrategy):
    r"""Normalises by the running average, this batch included, in training and in inference.

    $$r_k = m r_{k-1} + (1 - m) b_k, \qquad r_1 = b_1$$

    Training and inference agree, but in a step gradients flow only through $(1 - m) b_k$. At
    the usual momentum of 0.99 they see nearly nothing of the normalisation, and training is
    unstable in its first steps; at 0.5 it is stable. This is `mode="ema"` of
    `eqx.nn.BatchNorm`.

    **Arguments:** `momentum`: $m$, between 0 and 1.

    https://github.com/patrick-kidger/equinox/issues/659
    """

    def update(self, batch: Moments, memory: Running) -> tuple[Moments, Running]:
        # MANY batches have the weight 1, so nothing is debiased: neither the first batch nor
        # the memory of another strategy.
        batches = jnp.where(memory.batches > 0, MANY, 0)
        memory = memory._replace(batches=batches).push(batch, self.momentum)
        return memory.moments, memory
