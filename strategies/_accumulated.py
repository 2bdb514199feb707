"""`Accumulated`: micro-batches are collected, and remembered as one batch."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from ._base import AbstractStrategy
from ._moments import Moments
from ._training_batch import TrainingBatch
from ._wrapper import AbstractWrapper


class Accumulation(eqx.Module):
    """Holds the memory of a strategy, and the micro-batches that it has not taken in yet.

    **Fields:** `remembered`, the memory; `pending`, the pooled moments of the micro-batches;
    `batches`, how many they are; `skipped`, how many of all micro-batches were no update.
    """

    remembered: Any
    pending: Moments
    batches: Int[Array, ""]
    skipped: Int[Array, ""]

    @classmethod
    def begun(cls, remembered: Any, channels: int, dtype: DTypeLike) -> "Accumulation":
        """Returns this memory with no micro-batch pending; `dtype` is the mean's."""
        zero = jnp.zeros((), jnp.int32)
        return cls(remembered, Moments.zero(channels, dtype), zero, zero)


class Accumulated(AbstractWrapper):
    r"""Remembers `every` micro-batches as one batch, by the strategy that it wraps.

    A batch that does not fit into memory is split, and the gradients of its parts are added up,
    by `optax.MultiSteps` for example. Each micro-batch is normalised as the wrapped strategy
    says, with the memory from before all of them; so is inference. Their moments are merged
    (Chan, Golub and LeVeque, 1979), and the last of them hands what is pooled to the wrapped
    strategy. For a momentum $m$ and the pooled moments $b$ that is

    $$h \leftarrow m h + (1 - m) b$$

    once, where $k$ updates would keep $m^k$ of the past and leave the variance between the
    micro-batches out. They may be of different sizes.

    ```python
    wrap = lambda strategy: Accumulated(strategy, every=4)
    model, state = eqx_norm.models.reconfigure(model, state, approach=wrap)
    ```

    A micro-batch that is not finite is left out, and the next one takes its place.
    `accepted_index` counts micro-batches. A pool whose moments overflow is dropped.

    **Arguments:**

    - `strategy`: the strategy to wrap.
    - `every`: the number of micro-batches that are one batch, 1 or more.
    """

    strategy: AbstractStrategy[Any]
    every: int = eqx.field(static=True)

    def __check_init__(self):
        if self.every < 1:
            raise ValueError(
                f"every={self.every!r}: it is the number of micro-batches that are remembered "
                "as one batch, 1 or more."
            )

    def init(self, channels: int, dtype: DTypeLike) -> Accumulation:
        return Accumulation.begun(self.strategy.init(channels, dtype), channels, dtype)

    def update(
        self, batch: TrainingBatch, memory: Accumulation
    ) -> tuple[Moments, Accumulation]:
        # The layer has counted micro-batches; the wrapped strategy has seen batches.
        batch = dataclasses.replace(batch, step=batch.step - memory.skipped)
        used, _ = self.strategy.update(batch, memory.remembered)
        pooled = memory.pending.merge(batch)
        _, learnt = self.strategy.update(batch.with_moments(pooled), memory.remembered)
        batches = memory.batches + 1
        is_last = batches >= self.every
        is_update = is_last & pooled.finite
        after = Accumulation(
            _select(is_update, learnt, memory.remembered),
            _select(is_last, Moments.zero(len(batch.mean), batch.mean.dtype), pooled),
            _select(is_last, jnp.zeros_like(batches), batches),
            memory.skipped
            + _select(is_update, jnp.zeros_like(batches), jnp.ones_like(batches)),
        )
        return used, after

    def infer(self, memory: Accumulation) -> Moments:
        return self.strategy.infer(memory.remembered)

    def load(self, learnt: Moments) -> Accumulation:
        channels, dtype = learnt.mean.shape[0], learnt.mean.dtype
        return Accumulation.begun(self.strategy.load(learnt), channels, dtype)


def _select(condition: Array, if_true: Any, if_false: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)
