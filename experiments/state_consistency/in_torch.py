"""Lets the script run PyTorch's layer, and the operator beneath it."""

import functools

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (only with the peers)
from torch.utils.checkpoint import (  # pyright: ignore[reportMissingImports]  (as above)
    checkpoint,
)

from experiments.lab.peers import names, of_torch

from .claims import EPS, MOMENTUM, OP_BY_OP, Row


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

    def raises_while_tracing(self, x: np.ndarray) -> bool:
        return False  # here every operation has values

    def memory(self) -> list[np.ndarray]:
        # Running mean, running variance, how many batches were counted.
        return [tensor.numpy().copy() for tensor in self._layer.buffers()]
