"""`ema`: normalise by the running average."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp

from ._moments import Moments
from ._running import AbstractRunningStrategy, Running


class Ema(AbstractRunningStrategy):
    r"""Training and inference are both normalised by the running average

    $$r_k = m r_{k-1} + (1 - m) b_k, \qquad r_1 = b_1.$$

    Training and inference agree, but gradients flow through $(1 - m) b_k$ only. At the usual
    momentum of 0.99 nearly all of the normalisation is hidden from them, and training
    becomes unstable in its first steps; at 0.5 it behaves.

    Equinox's first `BatchNorm`, today's `mode="ema"`;
    https://github.com/patrick-kidger/equinox/issues/659.
    """

    momentum: float = eqx.field(default=0.99, static=True)

    def update(self, batch: Moments, memory: Running) -> tuple[Moments, Running]:
        # With weight 1 nothing is debiased: the first batch counts in full, and what another
        # strategy has remembered does, too.
        one = jnp.ones_like(memory.weight)
        seen = (memory.weight > 0).astype(one.dtype)
        memory = dataclasses.replace(memory, weight=seen, weight_rest=0 * one)
        memory = memory.push(batch, self.momentum)
        memory = dataclasses.replace(memory, weight=one, weight_rest=0 * one)
        return memory.moments, memory
