"""Runs PyTorch's operators eagerly, as usual; converts tensors from and to NumPy."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (only with the peers)
from numpy.typing import NDArray

from experiments.lab.environment import cores


def tensor(values: NDArray[Any], device: str = "cpu") -> Any:
    """Returns a tensor of these values and their dtype, bfloat16 included."""
    # By way of float64, since torch reads no bfloat16 from NumPy; the values stay.
    copied = torch.from_numpy(np.array(values, np.float64, order="C"))
    return copied.to(getattr(torch, values.dtype.name)).to(device)


def array(values: Any) -> NDArray[Any]:
    """Returns a tensor as an array of NumPy: float64 as it is, anything else as float32."""
    values = values.detach().cpu()
    return (values if values.dtype == torch.float64 else values.float()).numpy()


def batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    memory: Sequence[Any] = (None, None),
    *,
    momentum: float,
    eps: float,
    training: bool = True,
) -> Any:
    """Returns y; in training the memory, running mean and variance, is changed in place.

    `momentum` is the share that a batch leaves, as everywhere here; PyTorch's is the other.
    """
    return torch.nn.functional.batch_norm(
        x, *memory, weight, bias, training=training, momentum=1 - momentum, eps=eps
    )


def layer(channels: int, dimensions: int, *, momentum: float, eps: float) -> Any:
    """Returns the layer for `[N, channels, *spatial]`, with so many spatial dimensions."""
    kind = torch.nn.BatchNorm2d if dimensions == 2 else torch.nn.BatchNorm1d
    return kind(channels, eps=eps, momentum=1 - momentum)


def operator(layer: Any) -> Callable[[Any], Any]:
    """Returns what the layer calls in training, without the check of x that comes before."""
    return lambda x: torch.batch_norm(
        x,
        *(layer.weight, layer.bias, layer.running_mean, layer.running_var),
        *(True, layer.momentum, layer.eps, False),
    )


def layer_norm(x: Any, weight: Any, bias: Any, *, eps: float) -> Any:
    """Returns y for `x` of `[N, *shape]`; weight and bias are of `shape`, or `None`."""
    shape = tuple(x.shape[1:])
    if weight is None and bias is not None:
        # torch 2.13 has no backward pass in bfloat16 for a bias in float32 alone.
        weight = torch.ones(shape, dtype=bias.dtype)
    return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)


def use_all_cores() -> None:
    """Has torch use as many threads as XLA does."""
    torch.set_num_threads(cores())
