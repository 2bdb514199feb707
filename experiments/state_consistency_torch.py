"""PyTorch's layer, and the operator beneath it, for the state consistency experiment."""

import functools
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (only .venv-peers has it)
from torch.utils.checkpoint import (  # pyright: ignore[reportMissingImports]  (as above)
    checkpoint,
)

from .state_consistency_layers import EPS, MOMENTUM
from .state_consistency_rows import Setting
from .state_consistency_subject import Average, Memory, average_of
from .state_consistency_ways import OP_BY_OP

KINDS = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}


class OfTorch:
    def __init__(self, setting: Setting, *, operator: bool):
        make = KINDS[len(setting.shape)]
        # What PyTorch calls momentum is the other share.
        self._layer = make(setting.shape[1], eps=EPS, momentum=1 - MOMENTUM)
        self._operator = operator
        self._checkpoint = setting.way != OP_BY_OP
        self._backward = setting.backward

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self._layer.eval()(_tensor(x)).float().numpy()

    def train(self, x: np.ndarray) -> list[np.ndarray]:
        layer = self._layer.train()
        layer.zero_grad()
        forward = self._operate if self._operator else layer
        if self._checkpoint:
            forward = functools.partial(checkpoint, forward, use_reentrant=False)
        inputs = _tensor(x).requires_grad_()
        y = forward(inputs)
        arrays = [y]
        if self._backward:
            y.sin().sum().backward()
            arrays += [inputs.grad, layer.weight.grad, layer.bias.grad]
        return [array.detach().float().numpy() for array in arrays]

    def trace(self, x: np.ndarray) -> None:
        """Nothing: here every operation has values."""

    def memory(self) -> Memory:
        layer = self._layer
        kept = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
        return tuple(tensor.numpy().copy() for tensor in kept)

    def average(self) -> Average:
        return average_of(self.memory())

    def rejected(self) -> float:
        return np.nan

    def _operate(self, x: Any) -> Any:
        layer = self._layer
        statistics = layer.running_mean, layer.running_var
        return torch.batch_norm(
            x, layer.weight, layer.bias, *statistics, True, 1 - MOMENTUM, EPS, False
        )


def _tensor(x: np.ndarray) -> Any:
    # By way of float32, since torch reads no bfloat16 from NumPy; the values stay.
    return torch.from_numpy(x.astype(np.float32)).to(getattr(torch, x.dtype.name))
