"""Defines the form to which every layer in JAX is brought."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

# The mapped axis of those that take one example.
AXIS = "batch"

# Weight and bias, or `None`.
Affine = tuple[Any, Any]
# (weight and bias, memory, x) to y and the memory after it.
Apply = Callable[[Affine, Any, Any], tuple[Array, Any]]


class BatchNorm(NamedTuple):
    """Holds what a batch norm is made with."""

    channels: int
    momentum: float
    eps: float
    channel_axis: int
    affine: bool


class LayerNorm(NamedTuple):
    """Holds what a layer norm is made with."""

    shape: tuple[int, ...]
    eps: float


class Layer(NamedTuple):
    """Holds a layer as functions of plain arrays: parameters and memory go in and out.

    Outputs have the dtype that the layer gives them: Equinox's batch norm gives float32 for
    bfloat16.
    """

    memory: tuple[Array, ...]  # before the first batch
    train: Apply
    evaluate: Apply
    # Memory to running mean, running variance, and whatever else is remembered.
    statistics: Callable[[Any], tuple[Array, ...]] = lambda memory: ()
