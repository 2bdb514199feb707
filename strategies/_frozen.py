"""Defines `Frozen`, which normalises by the running statistics and never updates them."""

from typing import Any, ClassVar

from ._base import AbstractStrategy
from ._moments import Moments
from ._training_batch import TrainingBatch
from ._wrapper import AbstractWrapper


class Frozen(AbstractWrapper):
    r"""Normalises training batches as in inference, and never changes the memory.

    A layer with this approach is always in inference, whatever `eqx.nn.inference_mode` or
    `inference=` says, and needs no enclosing `vmap`. Its weight and bias are constants: only
    the gradient of `x` is not 0. `eqx_norm.models.freeze` wraps the strategies of a model.

    **Arguments:** `strategy`: the strategy to wrap, whose memory the layer holds.

    https://github.com/pytorch/pytorch/issues/66073
    """

    strategy: AbstractStrategy[Any]
    learns: ClassVar[bool] = False

    def update(self, batch: TrainingBatch, memory: Any) -> tuple[Moments, Any]:
        del batch
        return self.strategy.infer(memory), memory
