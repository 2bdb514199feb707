"""`Frozen`: normalise by what is remembered, and learn nothing."""

from typing import Any, ClassVar

from jax.typing import DTypeLike

from ._base import AbstractStrategy
from ._moments import Moments
from ._training_batch import TrainingBatch


class Frozen(AbstractStrategy[Any]):
    r"""Normalises training batches as inference does, and keeps the memory as it is.

    A layer with this approach is in inference, whatever `eqx.nn.inference_mode` or a call's
    `inference=` says, and its weight and bias are constants: of all gradients only that of $x$
    is not 0. It needs no enclosing `vmap`.

    **Arguments:** `strategy`: the strategy whose memory this is. `eqx_norm.models.freeze` wraps
    those of a whole model.

    The wish for it: https://github.com/pytorch/pytorch/issues/66073.
    """

    strategy: AbstractStrategy[Any]
    learns: ClassVar[bool] = False

    @property
    def momentum(self) -> float | None:
        """Returns the wrapped strategy's momentum, `None` if it has none."""
        return getattr(self.strategy, "momentum", None)

    def init(self, channels: int, dtype: DTypeLike) -> Any:
        return self.strategy.init(channels, dtype)

    def update(self, batch: TrainingBatch, memory: Any) -> tuple[Moments, Any]:
        del batch
        return self.strategy.infer(memory), memory

    def infer(self, memory: Any) -> Moments:
        return self.strategy.infer(memory)

    def load(self, learnt: Moments) -> Any:
        return self.strategy.load(learnt)
