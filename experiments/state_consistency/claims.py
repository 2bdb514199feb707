"""Defines a row of the matrix, and judges by the rows what this layer claims of its state."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.lab.claims import Verdict, worst
from experiments.lab.peers import names
from experiments.lab.rows import by

EPS = 1e-3  # that of the thread's script
MOMENTUM = 1 / 16
OURS = (names.OURS, names.OURS_UNBIASED)
# Those whose running variance has the factor n/(n-1).
UNBIASED = (names.OURS_UNBIASED, names.TORCH, names.TORCH_OPERATOR)
FINITE = "finite"
OP_BY_OP, JIT = "op by op", "jit"  # how the ways to run a layer end
CLOSE = 1e-6  # a few roundings of float32, whose relative precision is 6e-8


class Row(NamedTuple):
    # What is run.
    layer: str
    implementation: str  # empty where the layer has no choice
    dtype: str
    shape: tuple[int, ...]  # batch, channels, *spatial
    way: str
    backward: bool
    batch: str = FINITE  # or which number that is not finite the second batch holds
    # What came of it. NaN: it cannot be told here, or has no meaning.
    raised: str = ""  # by the training call
    while_tracing: bool = False  # whether it raises as soon as shapes are known
    evaluation_changed: bool = False  # whether an evaluation changed the memory
    difference: float = math.nan  # largest, of the evaluations before and after one update
    # How many updates of the running average a training call made: the first, the second.
    updates_1: float = math.nan
    updates_2: float = math.nan
    # Relative errors of what was taken into the average, the larger of two updates.
    mean_error: float = math.nan
    biased_error: float = math.nan
    unbiased_error: float = math.nan
    # Means, variances, and what else is remembered: at first, after each training call. In the
    # shortest digits that tell float32 numbers apart, so that bits can be compared.
    memory_0: str = ""
    memory_1: str = ""
    memory_2: str = ""
    # How many numbers are NaN or infinite: in outputs, gradients and memory while training
    # on finite batches; in the evaluations after each training call; in the last evaluation
    # and the memory, some batches after one that was not finite.
    nonfinite_training: int = 0
    nonfinite_evaluation: int = 0
    nonfinite_later: int = 0
    rejected: float = math.nan  # how many batches the layer says it has rejected

    @property
    def n(self) -> int:
        """Returns how many values a channel has."""
        return math.prod(self.shape) // self.shape[1]

    @property
    def values(self) -> str:
        """Returns what its batches are, in words."""
        return f"{self.dtype} {'x'.join(map(str, self.shape))}"

    @property
    def compiled(self) -> bool:
        return self.way.endswith(JIT)

    @property
    def unbiased(self) -> bool:
        return self.layer in UNBIASED

    @property
    def variance_error(self) -> float:
        """Returns the error of that variance which the layer says it remembers."""
        return self.unbiased_error if self.unbiased else self.biased_error


# Says what was measured, and whether it is as claimed.
Check = Callable[[list[Row]], tuple[str, bool]]


def _finite(row: Row) -> bool:
    return row.batch == FINITE


class Claim(NamedTuple):
    text: str
    check: Check
    about: Callable[[Row], bool] = _finite
    also_raised: bool = False  # whether it is about rows that raised, too

    def verdict(self, rows: Sequence[Row]) -> Verdict:
        about = [r for r in rows if self.about(r) and (self.also_raised or not r.raised)]
        of_peers = by((row for row in about if row.layer not in OURS), lambda row: row.layer)
        unlike = [name for name, found in of_peers.items() if not self.check(found)[1]]
        ours = [row for row in about if row.layer in OURS]
        measured, holds = self.check(ours) if ours else ("-", None)
        return Verdict(self.text, measured, holds, unlike=", ".join(unlike))


def _groups(rows: list[Row]) -> list[list[Row]]:
    """Returns the rows that differ only in how they were run, together."""
    return list(by(rows, lambda row: (row.layer, row.dtype, row.shape, row.batch)).values())


def _one_update(row: Row) -> bool:
    # NaN: Equinox's first in mode="ema" replaces what was there, and cannot be counted.
    return all(abs(n - 1) < 0.5 or np.isnan(n) for n in (row.updates_1, row.updates_2))


def _every(as_claimed: Callable[[Row], bool]) -> Check:
    def check(rows: list[Row]) -> tuple[str, bool]:
        wrong = [row for row in rows if not as_claimed(row)]
        said = f"in {len(rows) - len(wrong)} of {len(rows)} rows"
        return said + (f"; not {_where(wrong[0])}" if wrong else ""), not wrong

    return check


def _taken_in(error: str) -> Check:
    def check(rows: list[Row]) -> tuple[str, bool]:
        # What one of two updates has taken in cannot be told; claim 3 is about those.
        rows = [row for row in rows if _one_update(row)]
        if not rows:
            return "no row made one update", False
        largest, row = worst(rows, lambda row: getattr(row, error))
        return f"{largest:.1e} in {len(rows)} rows ({_where(row)})", largest <= CLOSE

    return check


def _where(row: Row) -> str:
    return f"{row.values}, {row.way}, {'with backward' if row.backward else 'forward'}"


def _same_bits(rows: list[Row]) -> tuple[str, bool]:
    patterns = [len({row.memory_1 for row in group}) for group in _groups(rows)]
    said = f"{len(rows)} rows of {len(patterns)} kinds: {_range(patterns)} pattern of bits each"
    return said, max(patterns) == 1


def _same_bits_next(rows: list[Row]) -> tuple[str, bool]:
    # memory + share * (batch - memory) is rounded twice op by op, and once where a compiler
    # makes one instruction of it. For values of one sign that is 1 ulp of the larger, at most.
    patterns, apart = [], []
    for group in _groups(rows):
        of_kinds = by(group, lambda row: row.compiled)
        patterns += [len({row.memory_2 for row in of}) for of in of_kinds.values()]
        before = _means_and_variances(group[0].memory_1)
        after = [_means_and_variances(row.memory_2) for row in group]
        ulp = np.spacing(np.max(np.abs([before, *after]), 0))
        apart.append((np.ptp(after, 0) / ulp).max())
    most = np.max(apart)  # NaN, if there is one
    said = f"{len(rows)} rows: {_range(patterns)} pattern each, {most:.2g} ulp between the two"
    return said, bool(max(patterns) == 1 and most <= 1)


def _means_and_variances(memory: str) -> np.ndarray:
    """Returns those numbers of a memory as it is written, in one array."""
    return np.array(" ".join(memory.split(" | ")[:2]).split(), np.float32)


def _same_difference(rows: list[Row]) -> tuple[str, bool]:
    differences = [[row.difference for row in group] for group in _groups(rows)]
    spread = np.max([np.ptp(group) / max(1, np.max(group)) for group in differences])
    least = np.min(np.concatenate(differences))
    said = f"{len(rows)} rows: by {least:.2g} or more, the same to {spread:.1e}"
    return said, bool(least > 0 and spread <= CLOSE)


def _range(counts: list[int]) -> str:
    least, most = min(counts), max(counts)
    return str(most) if least == most else f"{least} to {most}"


def _has_variance(row: Row) -> bool:
    return row.n > 1 or not row.unbiased


def _refused(row: Row) -> bool:
    untouched = row.memory_0 == row.memory_1
    return row.raised.startswith("ValueError") and row.while_tracing and untouched


CLAIMS = (
    Claim("1. it runs (but see 10)", _every(lambda r: not r.raised), _has_variance, True),
    Claim(
        "2. evaluation never changes the memory",
        _every(lambda row: not row.evaluation_changed),
        about=lambda row: True,
        also_raised=True,
    ),
    Claim("3. one training call is one update", _every(_one_update)),
    Claim("4. of the same bits, however it is run", _same_bits),
    Claim("5. the next too; op by op and compiled, to 1 ulp", _same_bits_next),
    Claim("6. evaluation then differs, by the same to 1e-6", _same_difference),
    Claim("7. an update takes in the batch's mean, to 1e-6", _taken_in("mean_error")),
    Claim(
        "8. and the variance that `unbiased` says, to 1e-6",
        _taken_in("variance_error"),
        about=lambda row: _finite(row) and _has_variance(row),
    ),
    Claim(
        "9. n = 1: nothing is NaN, neither now nor later",
        _every(lambda row: row.nonfinite_training == row.nonfinite_evaluation == 0),
        about=lambda row: row.n == 1,
    ),
    Claim(
        "10. n = 1, unbiased: ValueError while tracing, state as it was",
        _every(_refused),
        about=lambda row: not _has_variance(row),
        also_raised=True,
    ),
    Claim(
        "11. a batch with NaN, inf: memory as it was, batch counted",
        _every(lambda row: row.memory_1 == row.memory_2 and row.rejected == 1),
        about=lambda row: not _finite(row),
    ),
    Claim(
        "12. and all is finite ten batches later",
        _every(lambda row: row.nonfinite_later == row.nonfinite_evaluation == 0),
        about=lambda row: not _finite(row),
    ),
)
