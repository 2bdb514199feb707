"""A layer in the hands of the script, together with its memory; and any layer of JAX as one."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .state_consistency_rows import Setting
from .state_consistency_ways import WAYS, Apply, Step

# Means, variances, and what else is remembered.
Memory = tuple[np.ndarray, ...]
# The running means and variances, in float64.
Average = tuple[np.ndarray, np.ndarray]


class Subject(Protocol):
    def evaluate(self, x: np.ndarray) -> np.ndarray: ...

    def train(self, x: np.ndarray) -> list[np.ndarray]:
        """The output, and the gradients where there is a backward pass."""
        ...

    def trace(self, x: np.ndarray) -> None:
        """As much of `train` as needs no values."""
        ...

    def memory(self) -> Memory: ...

    def average(self) -> Average | None:
        """`None` before there is any."""
        ...

    def rejected(self) -> float:
        """The layer's own count of batches not learnt from; NaN if it has none."""
        ...


def average_of(memory: Memory) -> Average:
    mean, variance = (np.asarray(array, np.float64) for array in memory[:2])
    return mean, variance


class Pure(NamedTuple):
    """A layer of JAX as functions of (parameters, memory, x); the channels of x come second."""

    parameters: Any
    memory: Any
    train: Apply
    evaluate: Apply
    read: Callable[[Any], tuple[Any, ...]]  # memory to Memory
    average: Callable[[Memory], Average | None] = average_of
    rejected: Callable[[Any], float] = lambda memory: np.nan


# From the number of channels and the implementation.
Make = Callable[[int, str], Pure]


class OfJax:
    def __init__(self, make: Make, setting: Setting):
        made = (make, setting.shape[1], setting.implementation)
        self._pure = _pure(*made)
        self._train = _step(*made, setting.way, "train", setting.backward)
        self._evaluate = _step(*made, setting.way, "evaluate", False)
        # Another State object: Equinox's is used up by the first that sets something in it.
        self._memory = jax.tree.map(lambda leaf: leaf, self._pure.memory)

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        y, self._memory, _ = self._evaluate(self._pure.parameters, self._memory, jnp.asarray(x))
        return np.asarray(y, np.float32)

    def train(self, x: np.ndarray) -> list[np.ndarray]:
        y, self._memory, gradients = self._train(
            self._pure.parameters, self._memory, jnp.asarray(x)
        )
        return [np.asarray(leaf) for leaf in (y, *jax.tree.leaves(gradients))]

    def trace(self, x: np.ndarray) -> None:
        jax.eval_shape(self._train, self._pure.parameters, self._memory, x)

    def memory(self) -> Memory:
        return tuple(np.asarray(array) for array in self._pure.read(self._memory))

    def average(self) -> Average | None:
        return self._pure.average(self.memory())

    def rejected(self) -> float:
        return self._pure.rejected(self._memory)


# So that what is compiled once serves every batch.
@functools.cache
def _pure(make: Make, channels: int, implementation: str) -> Pure:
    return make(channels, implementation)


@functools.cache
def _step(
    make: Make, channels: int, implementation: str, way: str, mode: str, backward: bool
) -> Step:
    return WAYS[way].step(getattr(_pure(make, channels, implementation), mode), backward)
