"""Runs the thread's script: evaluate, train on a batch, evaluate; and once more.

The momentum is the share of the running average that an update leaves. It is near 0, so that
the average is nearly the batch's; and a power of two, so that what is left of the old average
can be taken out again: (after - momentum * before) / (1 - momentum) is what an update took in.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.lab import peers
from experiments.lab.peers import names

from .claims import EPS, FINITE, JIT, MOMENTUM, OP_BY_OP, OURS, Row

SHAPE = (1, 2, 3)  # that of the thread: batch, channels, *spatial
SEED = 0
LATER = 10  # batches after one that is not finite
# Where a training step fails, these are what it raises.
ERRORS = (TypeError, ValueError, NotImplementedError, RuntimeError)


class InJax:
    """Holds a layer with its memory; `in_torch.InTorch` has the same methods."""

    def __init__(self, row: Row):
        made = (row.layer, row.implementation, row.shape[1])
        self._layer = _layer(*made)
        self._train = _step(*made, row.way, "train", row.backward)
        self._evaluate = _step(*made, row.way, "evaluate", False)
        self._affine = jnp.ones(row.shape[1]), jnp.zeros(row.shape[1])
        self._memory: Any = self._layer.memory

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        y, self._memory, _ = self._evaluate(self._affine, self._memory, jnp.asarray(x))
        return np.asarray(y, np.float32)

    def train(self, x: np.ndarray) -> list[np.ndarray]:
        """Returns the output and, with a backward pass, the gradients."""
        y, self._memory, gradients = self._train(self._affine, self._memory, jnp.asarray(x))
        return [np.asarray(leaf) for leaf in (y, *jax.tree.leaves(gradients))]

    def raises_while_tracing(self, x: np.ndarray) -> bool:
        try:
            jax.eval_shape(self._train, self._affine, self._memory, x)
        except ERRORS:
            return True
        return False

    def memory(self) -> list[np.ndarray]:
        """Returns means, variances, and what else is remembered.

        Of this package that is the weight of both, and how many batches were rejected.
        """
        return [np.asarray(array) for array in self._layer.statistics(self._memory)]


# Cached, so that what is compiled once serves every batch.
@functools.cache
def _layer(name: str, implementation: str, channels: int) -> peers.Layer:
    of_ours: dict[str, Any] = {"implementation": implementation} if name in OURS else {}
    return peers.batch_norm(name, channels, momentum=MOMENTUM, eps=EPS, **of_ours)


@functools.cache
def _step(
    name: str, implementation: str, channels: int, way: str, mode: str, backward: bool
) -> Callable[[Any, Any, jax.Array], tuple[jax.Array, Any, Any]]:
    apply = WAYS[way](getattr(_layer(name, implementation, channels), mode))

    def step(affine: Any, memory: Any, x: jax.Array) -> tuple[jax.Array, Any, Any]:
        def loss(affine: Any, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            y, after = apply(affine, memory, x)
            return jnp.sum(jnp.sin(y)), (y, after)

        if backward:
            gradients, given = jax.grad(loss, (0, 1), has_aux=True)(affine, x)
            return *given, gradients
        return *apply(affine, memory, x), ()

    return jax.jit(step) if way.endswith(JIT) else step


def _scan(apply: peers.Apply) -> peers.Apply:
    def scanned(affine: Any, memory: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def body(memory: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            y, memory = apply(affine, memory, x)
            return memory, y

        memory, y = lax.scan(body, memory, x[None])
        return y[0], memory

    return scanned


WAYS: dict[str, Callable[[peers.Apply], peers.Apply]] = {
    OP_BY_OP: lambda apply: apply,
    JIT: lambda apply: apply,
    "checkpoint, op by op": jax.checkpoint,
    "checkpoint, jit": jax.checkpoint,
    "scan, jit": _scan,
}


def subject(row: Row) -> Any:
    """Returns the layer of the row, with its memory."""
    if names.package(row.layer) == "torch":
        from .in_torch import InTorch

        return InTorch(row)
    return InJax(row)


def batches(row: Row) -> list[np.ndarray]:
    """Returns two batches; and more, where a number in the second is not finite."""
    count = 2 if row.batch == FINITE else 2 + LATER
    values = 2 + 1.5 * np.random.RandomState(SEED).standard_normal((count, *row.shape))
    if row.batch != FINITE:
        values[1].flat[-1] = float(row.batch)
    return list(np.asarray(values, jnp.dtype(row.dtype)))


def play(subject: Any, row: Row) -> Row:
    """Returns the row with what came of it."""
    first, second, *later = batches(row)
    memories = [subject.memory()]
    evaluations, trained = [subject.evaluate(first)], []
    changed = said(subject.memory()) != said(memories[0])
    try:
        for x in (first, second):
            trained += subject.train(x)
            memories.append(subject.memory())
            evaluations.append(subject.evaluate(first))
            changed |= said(subject.memory()) != said(memories[-1])
    except ERRORS as error:
        return row._replace(
            raised=f"{type(error).__name__}: {str(error).splitlines()[0].partition('. ')[0]}",
            while_tracing=subject.raises_while_tracing(first),
            evaluation_changed=changed,
            memory_0=said(memories[0]),
            memory_1=said(subject.memory()),
        )
    row = row._replace(
        evaluation_changed=changed,
        difference=float(np.abs(evaluations[1] - evaluations[0]).max()),
        **{f"memory_{i}": said(memory) for i, memory in enumerate(memories)},
        nonfinite_evaluation=_nonfinite(evaluations[1:]),
        rejected=float(memories[2][3]) if row.layer in OURS else np.nan,
    )
    if row.batch != FINITE:
        for x in later:
            subject.train(x)
        left = [subject.evaluate(first), *subject.memory()[:2]]
        return row._replace(nonfinite_later=_nonfinite(left))
    before, between, after = (_average(row.layer, memory) for memory in memories)
    updates_1, *errors_1 = _update(before, between, first)
    updates_2, *errors_2 = _update(between, after, second)
    mean, biased, unbiased = map(float, np.maximum(errors_1, errors_2))
    return row._replace(
        nonfinite_training=_nonfinite([*trained, *memories[2][:2]]),
        updates_1=updates_1,
        updates_2=updates_2,
        mean_error=mean,
        biased_error=biased,
        unbiased_error=unbiased,
    )


def said(memory: Sequence[np.ndarray]) -> str:
    return " | ".join(" ".join(map(str, np.ravel(array))) for array in memory[:3])


def _average(layer: str, memory: Sequence[np.ndarray]) -> np.ndarray | None:
    """Returns means and variances that updates are steps of; `None` before there are any."""
    average = np.array(memory[:2], np.float64)
    if layer in OURS:  # what is remembered is debiased: the average from 0, over its weight
        return average * np.float64(memory[2])
    if layer == names.EQUINOX_EMA and memory[2]:  # its first batch replaces what is there
        return None
    return average


def _update(before: np.ndarray | None, after: np.ndarray | None, x: np.ndarray) -> list[float]:
    """Returns how many updates `after` is from `before`, and the errors of what one took in.

    Each leaves the share `MOMENTUM` of the distance of the running mean from the batch's. The
    errors, the largest relative ones, are those of the mean, and of the variance beside the
    batch's biased and its unbiased one.
    """
    if after is None:
        return [np.nan] * 4
    values = np.moveaxis(x.astype(np.float64), 1, 0).reshape(x.shape[1], -1)
    n, mean, biased = values.shape[1], values.mean(1), values.var(1)
    unbiased = biased * n / (n - 1) if n > 1 else np.full_like(biased, np.nan)
    updates, taken = np.nan, after  # without `before`, the batch is taken as it is
    with np.errstate(divide="ignore", invalid="ignore"):
        if before is not None:
            old, new = abs(before[0] - mean), abs(after[0] - mean)
            farthest = old.argmax()
            updates = float(np.log(new[farthest] / old[farthest]) / np.log(MOMENTUM))
            taken = (after - MOMENTUM * before) / (1 - MOMENTUM)
        right = np.stack([mean, biased, unbiased])
        off = abs(taken[[0, 1, 1]] - right)
        errors = np.where(off == 0, 0, off / abs(right)).max(1)
    return [updates, *map(float, errors)]


def _nonfinite(arrays: Iterable[np.ndarray]) -> int:
    return sum(int(np.sum(~np.isfinite(array))) for array in arrays)
