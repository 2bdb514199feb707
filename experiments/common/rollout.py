"""Computes PPO's ratio before the first update, of a policy in which only a norm can differ.

Observations and weights are random. A rollout computes y alone, in batches of several sizes, in
PyTorch with `no_grad`. Training computes y and all gradients, from random dy, of all rows or in
minibatches. The logits are `ACTIONS` values of y. NumPy computes log-probabilities of them, in
float32, outside the programs that are compared: the ratio is 1 if the bits of y are equal.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from . import peers
from .exact import Batch
from .timer import Program

ROWS, ACTIONS = 256, 8  # a row is an observation


class Result(NamedTuple):
    norm: str
    dtype: str
    layer: str
    length: int  # values of a row
    size: int  # rows in a batch of the rollout, and in a minibatch
    rows: int
    y: int  # rows of the rollout in which y differs from that of training with all rows
    dx: int  # rows in which dx differs between training in minibatches and with all rows
    ratio: int  # rows in which PPO's ratio is not 1
    largest: float  # |ratio - 1|


def compare(sizes: tuple[int, ...], case: tuple[str, str, str, int]) -> list[Result]:
    """Returns a result for each size; the case is norm, dtype, layer and length."""
    norm, dtype, layer, length = case
    random = np.random.default_rng(length)
    shape = (length // 16, 4, 4) if norm == peers.GROUP_NORM else (length,)
    x, dy = (random.normal(mean, 2, (ROWS, *shape)).astype(dtype) for mean in (1, 0))
    weight, bias = random.normal(1, 0.5, (2, shape[0])).astype(np.float32)
    batch = Batch(x, dy, weight, None if norm == peers.RMS_NORM else bias)
    logits, noise = random.choice(length, ACTIONS, False), random.gumbel(size=(ROWS, ACTIONS))
    y, dx = outputs(norm, layer, batch, ROWS, train=True)
    results = []
    for size in sizes:
        y_of_rollout, _ = outputs(norm, layer, batch, size, train=False)
        _, dx_of_minibatches = outputs(norm, layer, batch, size, train=True)
        old, new = (log_softmax(values[:, logits]) for values in (y_of_rollout, y))
        actions = np.argmax(old + noise, 1)[:, None]  # a sample of the rollout's policy
        far = np.abs(np.exp(np.take_along_axis(new - old, actions, 1)) - 1)
        counts = (
            differing(y_of_rollout, y),
            differing(dx_of_minibatches, dx),
            int((far > 0).sum()),
        )
        results.append(Result(*case, size, ROWS, *counts, float(far.max())))
    return results


def outputs(norm: str, layer: str, batch: Batch, size: int, *, train: bool) -> list[NDArray]:
    """Returns y, and in training dx, as rows in float32, from batches of this size."""
    compiled: Any = None
    parts = []
    for i in range(0, ROWS, size):
        part = batch._replace(x=batch.x[i : i + size], dy=batch.dy[i : i + size])
        if layer == peers.TORCH:
            program = peers.program_of_torch(norm, part, train, "cpu")
        else:
            function, arguments = peers.function(norm, layer, part, train=train)
            compiled = compiled or jax.jit(function)
            program = Program(partial(compiled, *arguments))
        found = jax.tree.leaves(program.call())  # y first and dx last, or y alone
        parts.append([program.read(found[place]) for place in (0, -1)])
    joined = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return [array.astype(np.float32).reshape(ROWS, -1) for array in joined]


def log_softmax(logits: NDArray) -> NDArray:
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def differing(a: NDArray, b: NDArray) -> int:
    """Returns the number of rows that differ in a bit."""
    return int((a.view(np.uint32) != b.view(np.uint32)).any(1).sum())
