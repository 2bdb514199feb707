"""Defines `Accumulated`, which remembers several micro-batches as one batch."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from eqx_norm._jax.constants import full

from ._base import AbstractStrategy
from ._moments import Moments, select
from ._numbers import is_count
from ._training_batch import TrainingBatch
from ._wrapper import AbstractWrapper


class Accumulation(eqx.Module):
    """Holds the memory of the wrapped strategy, and the moments of pending micro-batches.

    **Fields:** `remembered`: the wrapped strategy's memory; `pending`: the merged moments of
    the pending micro-batches; `batches`: their number; `skipped`: the number of micro-batches
    that did not update `remembered`. Both numbers are int32.
    """

    remembered: Any
    pending: Moments
    batches: Int[Array, "*members"]
    skipped: Int[Array, "*members"]

    @classmethod
    def begun(cls, remembered: Any, channels: int, dtype: DTypeLike) -> "Accumulation":
        """Returns `remembered` with no pending micro-batch; `dtype` is that of the mean."""
        # These are two arrays, because a program cannot donate one array twice.
        batches, skipped = (full((), 0, jnp.int32) for _ in range(2))
        return cls(remembered, Moments.zero(channels, dtype), batches, skipped)


class Accumulated(AbstractWrapper):
    r"""Remembers `every` micro-batches as one batch, by the wrapped strategy.

    Use it with gradient accumulation, by `optax.MultiSteps` for example. The wrapped strategy
    normalises each micro-batch, using its memory from before the first one. `Moments.merge`
    pools their moments (Chan, Golub and LeVeque, 1979), also of different sizes. After the last
    micro-batch, the pooled moments $b$ update the wrapped strategy once. With a momentum $m$,

    $$h \leftarrow m h + (1 - m) b,$$

    while $k$ updates would keep only $m^k$ of the past and ignore the variance between the
    micro-batches.

    ```python
    wrap = lambda strategy: Accumulated(strategy, every=4)
    model, state = eqx_norm.models.reconfigure(model, state, approach=wrap)
    ```

    A micro-batch that is not finite is replaced by the next one. The layer counts accepted
    micro-batches. Pooled moments that overflow are dropped.

    **Arguments:**

    - `strategy`: the strategy to wrap.
    - `every`: the number of micro-batches in a batch, 1 or more.

    **Raises:** `ValueError` for an invalid `every`, and for an invalid or frozen `strategy`.
    """

    strategy: AbstractStrategy[Any]
    every: int = eqx.field(static=True)

    def __check_init__(self):
        if not is_count(self.every):
            raise ValueError(
                f"every={self.every!r}: it is the number of micro-batches to remember as one "
                "batch, and must be an int of 1 or more."
            )

    def init(self, channels: int, dtype: DTypeLike) -> Accumulation:
        return Accumulation.begun(self.strategy.init(channels, dtype), channels, dtype)

    def update(
        self, batch: TrainingBatch, memory: Accumulation
    ) -> tuple[Moments, Accumulation]:
        # The layer counts micro-batches, the wrapped strategy batches.
        batch = dataclasses.replace(batch, step=batch.step - memory.skipped)
        used, _ = self.strategy.update(batch, memory.remembered)
        pooled = memory.pending.merge(batch)
        _, learnt = self.strategy.update(batch.with_moments(pooled), memory.remembered)
        batches = memory.batches + 1
        is_last = batches >= self.every
        is_update = is_last & pooled.finite
        after = Accumulation(
            select(is_update, learnt, memory.remembered),
            select(is_last, Moments.zero(len(batch.m2), batch.mean.dtype), pooled),
            jnp.where(is_last, 0, batches),
            jnp.where(is_update, memory.skipped, memory.skipped + 1),
        )
        return used, after

    def infer(self, memory: Accumulation) -> Moments:
        return self.strategy.infer(memory.remembered)

    def load(self, learnt: Moments) -> Accumulation:
        channels, dtype = learnt.mean.shape[0], learnt.mean.dtype
        return Accumulation.begun(self.strategy.load(learnt), channels, dtype)

    def without_pending(self, memory: Accumulation) -> tuple[Any, Any]:
        return memory.remembered, memory.skipped
