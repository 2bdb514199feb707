"""Runs the thread's script: evaluate, train on a batch, evaluate; and once more."""

import importlib
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from experiments.lab.peers import names

from .row import FINITE, Row
from .subjects import MOMENTUM, Average, InJax, Memory, Subject, average

SHAPE = (1, 2, 3)  # that of the thread: batch, channels, *spatial
SEED = 0
LATER = 10  # batches after one that is not finite
USED_UP = "used up"
# Where a training step fails, these are what it raises.
ERRORS = (TypeError, ValueError, NotImplementedError, RuntimeError)


def batches(row: Row) -> list[np.ndarray]:
    """Returns two batches; and more, where a number in the second is not finite."""
    count = 2 if row.batch == FINITE else 2 + LATER
    values = 2 + 1.5 * np.random.RandomState(SEED).standard_normal((count, *row.shape))
    if row.batch != FINITE:
        values[1].flat[-1] = float(row.batch)
    return list(np.asarray(values, jnp.dtype(row.dtype)))


def by_hand(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns mean, biased and unbiased variance of each channel, in float64."""
    values = np.moveaxis(x.astype(np.float64), 1, 0).reshape(x.shape[1], -1)
    n, biased = values.shape[1], values.var(1)
    unbiased = biased * n / (n - 1) if n > 1 else np.full_like(biased, np.nan)
    return values.mean(1), biased, unbiased


def subject(row: Row) -> Subject:
    """Returns the layer of the row, with its memory."""
    if names.package(row.layer) == "torch":  # imported only where it is asked for
        return importlib.import_module(".in_torch", __package__).InTorch(row)
    return InJax(row)


def play(subject: Subject, row: Row) -> Row:
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
            while_tracing=_raises_while_tracing(subject, first),
            evaluation_changed=changed,
            memory_0=said(memories[0]),
            memory_1=_memory_left(subject, first),
        )
    row = row._replace(
        evaluation_changed=changed,
        difference=float(np.abs(evaluations[1] - evaluations[0]).max()),
        **{f"memory_{i}": said(memory) for i, memory in enumerate(memories)},
        nonfinite_evaluation=_nonfinite(evaluations[1:]),
        rejected=memories[2].rejected,
    )
    if row.batch != FINITE:
        for x in later:
            subject.train(x)
        left = [subject.evaluate(first), *subject.memory().kept[:2]]
        return row._replace(nonfinite_later=_nonfinite(left))
    averages = [average(row.layer, memory) for memory in memories]
    updates = [*zip(averages[:-1], averages[1:], (first, second), strict=True)]
    mean, biased, unbiased = map(float, np.max([_errors(*update) for update in updates], 0))
    updates_1, updates_2 = (_updates(*update) for update in updates)
    return row._replace(
        nonfinite_training=_nonfinite([*trained, *memories[2].kept[:2]]),
        updates_1=updates_1,
        updates_2=updates_2,
        mean_error=mean,
        biased_error=biased,
        unbiased_error=unbiased,
    )


def said(memory: Memory) -> str:
    return " | ".join(" ".join(map(str, np.ravel(array))) for array in memory.kept)


def means_and_variances(memory: str) -> np.ndarray:
    """Returns those numbers of what `said` wrote, in one array."""
    return np.array(" ".join(memory.split(" | ")[:2]).split(), np.float32)


def _updates(before: Average | None, after: Average | None, x: np.ndarray) -> float:
    """Returns how many steps towards the mean of `x` the running mean has made.

    Each leaves the share `MOMENTUM` of the distance.
    """
    if before is None or after is None:
        return np.nan
    mean, *_ = by_hand(x)
    old, new = abs(before[0] - mean), abs(after[0] - mean)
    farthest = old.argmax()
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.log(new[farthest] / old[farthest]) / np.log(MOMENTUM))


def _errors(before: Average | None, after: Average | None, x: np.ndarray) -> list[float]:
    """Returns the largest relative errors of the mean and the variance that were taken in.

    They are those beside the mean, the biased and the unbiased variance `by_hand`.
    """
    if after is None:
        return [np.nan] * 3
    mean, variance = after
    if before is not None:  # else the first batch is taken as it is
        pairs = zip(after, before, strict=True)
        mean, variance = ((new - MOMENTUM * old) / (1 - MOMENTUM) for new, old in pairs)
    found = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for taken, right in zip((mean, variance, variance), by_hand(x), strict=True):
            error = abs(taken - right)
            found.append(float(np.where(error == 0, 0, error / abs(right)).max()))
    return found


def _nonfinite(arrays: Iterable[np.ndarray]) -> int:
    return sum(int(np.sum(~np.isfinite(array))) for array in arrays)


def _raises_while_tracing(subject: Subject, x: np.ndarray) -> bool:
    try:
        subject.trace(x)
    except ERRORS:
        return True
    return False


def _memory_left(subject: Subject, x: np.ndarray) -> str:
    """Returns what can be read and used after a call has failed."""
    try:
        subject.evaluate(x)
        return said(subject.memory())
    except ERRORS:
        return USED_UP
