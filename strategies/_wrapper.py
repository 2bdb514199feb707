"""Defines `AbstractWrapper`, the base class of strategies that wrap another one."""

from typing import Any

import equinox as eqx
from jax.typing import DTypeLike

from ._base import AbstractStrategy
from ._moments import Moments


class AbstractWrapper(AbstractStrategy[Any]):
    """Passes all calls but `update` on to the wrapped strategy, and has the same memory.

    **Fields:** `strategy`: the strategy to wrap, which is not frozen.
    """

    strategy: eqx.AbstractVar[AbstractStrategy[Any]]

    def __check_init__(self):
        inner: object = self.strategy
        if not (isinstance(inner, AbstractStrategy) and inner.learns):
            raise ValueError(
                f"strategy={inner!r}: {type(self).__name__} wraps a strategy object that "
                "learns, for example eqx_norm.strategies.Batch(), with the parentheses. Only "
                "the outermost may be Frozen."
            )

    @property
    def momentum(self) -> float | None:
        """Returns the wrapped strategy's momentum, or `None`."""
        return getattr(self.strategy, "momentum", None)

    @property
    def starts_as_batch(self) -> bool:
        return self.strategy.starts_as_batch

    def init(self, channels: int, dtype: DTypeLike) -> Any:
        return self.strategy.init(channels, dtype)

    def infer(self, memory: Any) -> Moments:
        return self.strategy.infer(memory)

    def load(self, learnt: Moments) -> Any:
        return self.strategy.load(learnt)

    def without_pending(self, memory: Any) -> tuple[Any, Any]:
        return self.strategy.without_pending(memory)
