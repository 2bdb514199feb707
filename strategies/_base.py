"""Defines `AbstractStrategy`, the base class of all strategies."""

import abc
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
from jax.typing import DTypeLike

from ._moments import Moments
from ._training_batch import TrainingBatch

Memory = TypeVar("Memory")


class AbstractStrategy(eqx.Module, Generic[Memory]):
    """Chooses the moments that normalise a batch, and updates the memory.

    A strategy object holds only hyperparameters, in static fields. Its memory (the strategy's
    running statistics) is a separate pytree of arrays that the layer keeps in `eqx.nn.State`.
    A strategy is plain JAX on vectors, with one number per channel, and needs no layers, axis
    names, devices or kernels. JAX differentiates it, in the memory, too. docs/own_strategy.md
    explains how to write one, and how to keep it exact.

    Subclasses implement `init`, `update` and `infer`. (`infer` is not called `inference`, since
    `eqx.nn.inference_mode` sets attributes of that name.) If a subclass sets `learns = False`,
    its layers are always in inference, and their weights are constants unless the subclass
    overrides `trains_weights`.

    This example normalises by the batch, and in inference by all values seen so far:

    ```python
    class Cumulative(AbstractStrategy[Moments]):
        def init(self, channels, dtype):
            return Moments.zero(channels, dtype)

        def update(self, batch, memory):
            return batch, memory.merge(batch)

        def infer(self, memory):
            return memory
    ```
    """

    learns: ClassVar[bool] = True

    @abc.abstractmethod
    def init(self, channels: int, dtype: DTypeLike) -> Memory:
        """Returns the memory before any batch, a pytree of arrays.

        **Arguments:** `channels`: the number of channels; `dtype`: of the running mean, float32
        (float64 under x64) or complex.
        """

    @abc.abstractmethod
    def update(self, batch: TrainingBatch, memory: Memory) -> tuple[Moments, Memory]:
        """Returns the moments that normalise a training batch, and the memory after it.

        **Arguments:** `batch`: the moments of the batch, with `eps` and `step`; `memory`: the
        memory before the batch. The new memory must have the same structure, shapes and dtypes.
        """

    @abc.abstractmethod
    def infer(self, memory: Memory) -> Moments:
        """Returns the moments for inference; before any batch, mean 0 and variance 1."""

    def load(self, learnt: Moments) -> Memory:
        """Returns a memory whose running statistics are those of `learnt`.

        `reconfigure`, `recalibrate` and `from_torch` of `eqx_norm.models` call it. The running
        variance is `learnt.variance`; `learnt.count` is `None` if it is not known.

        **Raises:** `NotImplementedError` unless a subclass implements it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot take over running statistics: give it a method "
            "`load(self, learnt: Moments)`, which returns a memory with these statistics."
        )

    @property
    def trains_weights(self) -> bool:
        """Returns whether gradients reach the layer's weight, bias and `activation`."""
        return self.learns

    # A layer cannot see this in the moments that `update` returns. With one value per channel
    # `Renorm` by default gives the bias for 5,000 batches, without an error.
    @property
    def starts_as_batch(self) -> bool:
        """Returns whether the first batches are normalised by their own moments alone, and
        later batches by others. A layer warns if a first batch has one value per channel."""
        return False

    # The number is `Any`, because `eqx.tree_at` calls this with leaves that are no arrays.
    def without_pending(self, memory: Any) -> tuple[Any, Any]:
        """Returns the memory without pending micro-batches, and the number of accepted
        micro-batches that did not update the memory; `Accumulated` overrides this method."""
        return memory, 0
