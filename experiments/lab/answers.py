"""Asks every layer for what it gives in a step of training, to be compared with `exact`.

Parameters are as the batch has them. The momentum of a batch norm is such that its running
variance after the batch is the variance of the batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from . import peers
from .exact import EPS, Answer, Batch
from .passes import BOTH, function
from .peers import names


def batch_norm(name: str, batch: Batch) -> Answer:
    """Returns the answer of the batch norm of that name, in float64."""
    if name == names.TORCH:
        return _torch_batch_norm(batch)
    # Flax's default is to have the channels last.
    axis = -1 if names.package(name) == "flax" else 1
    # This package takes no momentum of 0, and remembers a first batch as it is at any.
    momentum = 0.5 if names.package(name) == "eqx_norm" else 0.0
    how = {"momentum": momentum, "channel_axis": axis, "affine": batch.weight is not None}
    x, dy = (np.moveaxis(values, 1, axis) for values in (batch.x, batch.dy))
    moved = batch._replace(x=x, dy=dy)
    answer = _in_jax(moved, peers.batch_norm, name, batch.x.shape[1], **how)
    y, dx = (np.moveaxis(values, axis, 1) for values in (answer.y, answer.dx))
    return answer._replace(y=y, dx=dx)


def layer_norm(name: str, batch: Batch) -> Answer:
    """Returns the answer of the layer norm of that name, in float64, without the variance."""
    if name == names.TORCH:
        from .peers import of_torch

        return _in_torch(of_torch.layer_norm, batch)
    return _in_jax(batch, peers.layer_norm, name, batch.x.shape[1:])


def _in_jax(batch: Batch, *layer: Any, **how: Any) -> Answer:
    double, affine = batch.x.dtype == np.float64, (batch.weight, batch.bias)
    with jax.enable_x64(double):
        made, step = _step(double, *layer, **how)
        y, memory, (affine, dx) = step(affine, made.memory, batch.x, batch.dy)
    variance = (made.statistics(memory) or (None, None))[1]
    return _answer(y, variance, dx, *affine)


# Cached, as a step is compiled once for each shape, however many batches there are of it.
@functools.cache
def _step(
    double: bool, make: Callable[..., peers.Layer], name: str, size: Any, **how: Any
) -> tuple[peers.Layer, Callable[..., Any]]:
    """Returns the layer, made with or without 64 bits, and its forward and backward pass."""
    made = make(name, size, eps=EPS, **how)
    return made, jax.jit(function(made, BOTH))


def _torch_batch_norm(batch: Batch) -> Answer:
    from .peers import of_torch

    channels, wide = batch.x.shape[1], np.result_type(batch.x.dtype, np.float32)
    memory = [of_torch.tensor(np.full(channels, start, wide)) for start in (0, 1)]
    forward = functools.partial(of_torch.batch_norm, memory=memory, momentum=0.0)
    answer = _in_torch(forward, batch)
    # What torch remembers is the unbiased variance.
    n = batch.x.size // channels
    return answer._replace(variance=of_torch.array(memory[1]).astype(float) * (n - 1) / n)


def _in_torch(forward: Callable[..., Any], batch: Batch) -> Answer:
    from .peers import of_torch

    x, weight, bias = (
        None if values is None else of_torch.tensor(values).requires_grad_()
        for values in (batch.x, batch.weight, batch.bias)
    )
    y = forward(x, weight, bias, eps=EPS)
    y.backward(of_torch.tensor(batch.dy))
    gradients = (None if v is None else of_torch.array(v.grad) for v in (x, weight, bias))
    return _answer(of_torch.array(y), None, *gradients)


def _answer(*arrays: Any) -> Answer:
    return Answer(*(None if a is None else np.asarray(a, np.float64) for a in arrays))
