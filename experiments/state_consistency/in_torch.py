"""Lets the script run PyTorch's layer, and the operator beneath it."""

import functools

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (only with the peers)
from torch.utils.checkpoint import (  # pyright: ignore[reportMissingImports]  (as above)
    checkpoint,
)

from experiments.lab.peers import names, of_torch

from .row import Row
from .subjects import EPS, MOMENTUM, OP_BY_OP, Memory


class InTorch:
    def __init__(self, row: Row):
        dimensions = len(row.shape) - 2
        self._layer = of_torch.layer(row.shape[1], dimensions, momentum=MOMENTUM, eps=EPS)
        operator = row.layer == names.TORCH_OPERATOR
        self._forward = of_torch.operator(self._layer) if operator else self._layer
        if row.way != OP_BY_OP:
            self._forward = functools.partial(checkpoint, self._forward, use_reentrant=False)
        self._backward = row.backward

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return of_torch.array(self._layer.eval()(of_torch.tensor(x)))

    def train(self, x: np.ndarray) -> list[np.ndarray]:
        layer = self._layer.train()
        layer.zero_grad()
        inputs = of_torch.tensor(x).requires_grad_()
        y = self._forward(inputs)
        tensors = [y]
        if self._backward:
            y.sin().sum().backward()
            tensors += [inputs.grad, layer.weight.grad, layer.bias.grad]
        return [of_torch.array(tensor) for tensor in tensors]

    def trace(self, x: np.ndarray) -> None:
        """Does nothing: here every operation has values."""

    def memory(self) -> Memory:
        layer = self._layer
        kept = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
        return Memory(tuple(tensor.numpy().copy() for tensor in kept))
