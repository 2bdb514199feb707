"""Defines `AbstractWrapper`, the base class of strategies that wrap another one."""

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ._base import AbstractStrategy
from ._moments import Moments


class AbstractWrapper(AbstractStrategy[PyTree]):
    """Passes all calls but `update` on to the wrapped strategy, and has the same memory.

    **Fields:** `strategy`: the strategy to wrap, which is not frozen.
    """

    strategy: eqx.AbstractVar[AbstractStrategy[PyTree]]

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

    def init(self, channels: int, dtype: DTypeLike) -> PyTree:
        return self.strategy.init(channels, dtype)

    def infer(self, memory: PyTree) -> Moments:
        return self.strategy.infer(memory)

    def load(self, learnt: Moments) -> PyTree:
        return self.strategy.load(learnt)

    def without_pending(self, memory: PyTree) -> tuple[PyTree, PyTree]:
        return self.strategy.without_pending(memory)
