"""Defines `Frozen`, which normalises by the running statistics and never updates them."""

from typing import Any, ClassVar

import equinox as eqx

from ._base import AbstractStrategy
from ._moments import Moments
from ._training_batch import TrainingBatch
from ._wrapper import AbstractWrapper


class Frozen(AbstractWrapper):
    r"""Normalises training batches as in inference, and never changes the memory.

    A layer with this approach is always in inference, whatever `eqx.nn.inference_mode` or
    `inference=` says, and needs no enclosing `vmap`. `eqx_norm.models.freeze` wraps the
    strategies of a model.

    **Arguments:**

    - `strategy`: the strategy to wrap, whose memory the layer holds.
    - `weights`: whether weight, bias and `activation` of the layer are constants, too: only the
        gradient of `x` is then not 0. With `False` their gradients are those of inference.

    https://github.com/pytorch/pytorch/issues/66073
    """

    strategy: AbstractStrategy[Any]
    weights: bool = eqx.field(default=True, static=True, converter=bool)
    learns: ClassVar[bool] = False

    @property
    def trains_weights(self) -> bool:
        return not self.weights

    def update(self, batch: TrainingBatch, memory: Any) -> tuple[Moments, Any]:
        del batch
        return self.strategy.infer(memory), memory
