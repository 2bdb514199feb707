"""`Accumulated`: micro-batches are collected, and remembered all at once."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from ._base import AbstractStrategy
from ._moments import Moments
from ._training_batch import TrainingBatch


class Accumulation(eqx.Module):
    """Holds the memory of a strategy, and the micro-batches that it has not taken in yet.

    **Fields:** `remembered`, the memory; `pending`, the pooled moments of the micro-batches;
    `batches`, how many they are.
    """

    remembered: Any
    pending: Moments
    batches: Int[Array, ""]

    @classmethod
    def begun(cls, remembered: Any, channels: int, dtype: DTypeLike) -> "Accumulation":
        """Returns this memory with no micro-batch pending; `dtype` is the mean's."""
        return cls(remembered, Moments.zero(channels, dtype), jnp.zeros((), jnp.int32))


class Accumulated(AbstractStrategy[Accumulation]):
    r"""Collects the moments of micro-batches, while the strategy that it wraps learns nothing.

    Each micro-batch is normalised as the wrapped strategy would, with the memory from before
    all of them; so is inference. Their moments are merged (Chan, Golub and LeVeque, 1979), and
    `eqx_norm.update_once` hands what they pool to the wrapped strategy, as one batch. For a
    momentum $m$ and the pooled moments $b$ that is $h \leftarrow m h + (1 - m) b$, once, where
    $k$ updates would keep $m^k$ of the past and leave the variance between the micro-batches
    out.

    **Arguments:** `strategy`: the strategy to wrap. `eqx_norm.accumulate` wraps those of a
    whole model.
    """

    strategy: AbstractStrategy[Any]

    @property
    def momentum(self) -> float | None:
        """Returns the wrapped strategy's momentum, `None` if it has none."""
        return getattr(self.strategy, "momentum", None)

    def init(self, channels: int, dtype: DTypeLike) -> Accumulation:
        return Accumulation.begun(self.strategy.init(channels, dtype), channels, dtype)

    def update(
        self, batch: TrainingBatch, memory: Accumulation
    ) -> tuple[Moments, Accumulation]:
        # The layer has counted the micro-batches; the wrapped strategy has not seen them.
        seen = dataclasses.replace(batch, step=batch.step - memory.batches)
        used, _ = self.strategy.update(seen, memory.remembered)
        pending = memory.pending.merge(batch)
        return used, Accumulation(memory.remembered, pending, memory.batches + 1)

    def infer(self, memory: Accumulation) -> Moments:
        return self.strategy.infer(memory.remembered)

    def load(self, learnt: Moments) -> Accumulation:
        channels, dtype = learnt.mean.shape[0], learnt.mean.dtype
        return Accumulation.begun(self.strategy.load(learnt), channels, dtype)
