"""`Frozen`: normalise by what is remembered, and learn nothing."""

from typing import Any, ClassVar

from ._base import AbstractStrategy
from ._moments import Moments
from ._training_batch import TrainingBatch
from ._wrapper import AbstractWrapper


class Frozen(AbstractWrapper):
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

    def update(self, batch: TrainingBatch, memory: Any) -> tuple[Moments, Any]:
        del batch
        return self.strategy.infer(memory), memory
