"""Defines `AbstractStrategy`, the contract that every strategy keeps."""

import abc
from typing import ClassVar, Generic, TypeVar

import equinox as eqx
from jax.typing import DTypeLike

from ._moments import Moments
from ._training_batch import TrainingBatch

Memory = TypeVar("Memory")


class AbstractStrategy(eqx.Module, Generic[Memory]):
    """Decides which moments normalise a training batch, and what is remembered of it.

    A strategy object holds hyperparameters only (static fields). What it has learnt from
    the batches, its *memory*, is a separate pytree of arrays: the layer keeps it in
    `eqx.nn.State`, hands it in and takes it back. A strategy knows nothing of layers, axis
    names, devices or kernels: it sees per-channel vectors and is written in plain JAX. It is
    differentiated by JAX; the layer makes sure that no gradient flows into the memory.
    `README.md` in this folder says how to write a strategy, and how to keep it exact.

    It implements three methods:

    - `init(channels, dtype) -> memory`: the memory before any batch. `dtype` is that of the
      statistics: float32, or float64 under x64, or their complex counterparts.
    - `update(batch, memory) -> (used, memory)`: training. `batch` is a `TrainingBatch`: its
      `Moments`, the layer's `eps`, and the number of the `step`. `used` are the moments that
      normalise this batch. The new memory has the structure, shapes and dtypes of the old.
    - `infer(memory) -> used`: inference. Before any batch this must be the identity, mean 0
      and variance 1. (Not called `inference`: `eqx.nn.inference_mode` looks for attributes
      of that name.)

    `learns` is true. Where a class says otherwise, its layers are always in inference, and
    their weights are constants.

    An example: normalise by the batch, and at inference by all the values ever seen.

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
        """Returns the memory before any batch."""

    @abc.abstractmethod
    def update(self, batch: TrainingBatch, memory: Memory) -> tuple[Moments, Memory]:
        """Returns the moments that normalise a training batch, and the memory after it."""

    @abc.abstractmethod
    def infer(self, memory: Memory) -> Moments:
        """Returns the moments that normalise at inference."""

    def load(self, learnt: Moments) -> Memory:
        """Returns the memory of one who has learnt these moments elsewhere.

        They may come from a pass over data, from another strategy, or from PyTorch. The running
        variance is their `memory_variance`. Strategies that remember a `Running` have this; a
        strategy of your own needs it only to take over statistics.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot take over statistics that were learnt elsewhere: "
            "give it a method `load(learnt: Moments)`, which returns the memory that it would "
            "have learnt."
        )
