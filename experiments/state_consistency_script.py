"""The thread's script, for one row: evaluate, train on a batch, evaluate; and once more."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from .state_consistency_layers import BY_NAME, ERRORS, MOMENTUM
from .state_consistency_rows import FINITE, Found, Row, Setting, said
from .state_consistency_subject import Average, Subject

SEED = 0
LATER = 10  # batches after one that is not finite
USED_UP = "used up"


def row(setting: Setting) -> Row:
    return setting, play(BY_NAME[setting.layer].make(setting), setting)


def batches(setting: Setting) -> list[np.ndarray]:
    """Two batches; or, with a number in the second that is not finite, that and more."""
    count = 2 if setting.batch == FINITE else 2 + LATER
    values = np.random.RandomState(SEED).standard_normal((count, *setting.shape))
    values = 2 + 1.5 * values
    if setting.batch != FINITE:
        values[1].flat[-1] = float(setting.batch)
    return list(np.asarray(values, jnp.dtype(setting.dtype)))


def by_hand(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, biased and unbiased variance of each channel, in float64; NaN if there is none."""
    values = np.moveaxis(x.astype(np.float64), 1, 0).reshape(x.shape[1], -1)
    n, biased = values.shape[1], values.var(1)
    unbiased = biased * n / (n - 1) if n > 1 else np.full_like(biased, np.nan)
    return values.mean(1), biased, unbiased


def play(subject: Subject, setting: Setting) -> Found:
    first, second, *later = batches(setting)
    memories, averages = [said(subject.memory())], [subject.average()]
    evaluations, trained = [subject.evaluate(first)], []
    changed = said(subject.memory()) != memories[0]
    try:
        for x in (first, second):
            trained += subject.train(x)
            memories.append(said(subject.memory()))
            averages.append(subject.average())
            evaluations.append(subject.evaluate(first))
            changed |= said(subject.memory()) != memories[-1]
    except ERRORS as error:
        return Found(
            raised=f"{type(error).__name__}: {str(error).splitlines()[0].partition('. ')[0]}",
            while_tracing=_raises_while_tracing(subject, first),
            evaluation_changed=changed,
            memory_0=memories[0],
            memory_1=_memory_left(subject, first),
        )
    found = Found(
        evaluation_changed=changed,
        difference=float(np.abs(evaluations[1] - evaluations[0]).max()),
        memory_0=memories[0],
        memory_1=memories[1],
        memory_2=memories[2],
        nonfinite_evaluation=_nonfinite(evaluations[1:]),
        rejected=subject.rejected(),
    )
    if setting.batch != FINITE:
        for x in later:
            subject.train(x)
        left = [subject.evaluate(first), *subject.memory()[:2]]
        return replace(found, nonfinite_later=_nonfinite(left))
    updates = [*zip(averages[:-1], averages[1:], (first, second), strict=True)]
    mean, biased, unbiased = np.max([_errors(*update) for update in updates], 0)
    return replace(
        found,
        nonfinite_training=_nonfinite([*trained, *subject.memory()[:2]]),
        updates_1=_updates(*updates[0]),
        updates_2=_updates(*updates[1]),
        mean_error=float(mean),
        biased_error=float(biased),
        unbiased_error=float(unbiased),
    )


def _updates(before: Average | None, after: Average | None, x: np.ndarray) -> float:
    """How many steps towards the mean of `x` the running mean has made.

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
    """Of the mean and the variance taken in, beside those `by_hand`: the largest, relative."""
    if after is None:
        return [np.nan] * 3
    if before is None:  # then the first batch is taken as it is
        mean, variance = after
    else:
        mean, variance = (
            (new - MOMENTUM * old) / (1 - MOMENTUM)
            for old, new in zip(before, after, strict=True)
        )
    pairs = zip((mean, variance, variance), by_hand(x), strict=True)
    return [_largest(abs(given - right), abs(right)) for given, right in pairs]


def _largest(error: np.ndarray, of: np.ndarray) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(error == 0, 0, error / of).max())


def _nonfinite(arrays: Sequence[np.ndarray]) -> int:
    return sum(int(np.sum(~np.isfinite(array))) for array in arrays)


def _raises_while_tracing(subject: Subject, x: np.ndarray) -> bool:
    try:
        subject.trace(x)
    except ERRORS:
        return True
    return False


def _memory_left(subject: Subject, x: np.ndarray) -> str:
    """What can be read and used after a call has failed."""
    try:
        subject.evaluate(x)
        return said(subject.memory())
    except ERRORS:
        return USED_UP
