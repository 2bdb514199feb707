"""Judges what this layer claims of its state, and with which other layers it is not so."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.lab.claims import Verdict, worst
from experiments.lab.rows import by

from .row import FINITE, OURS, Row
from .script import means_and_variances
from .subjects import WAYS

# float32 has a relative precision of 6e-8: a few roundings.
CLOSE = 1e-6

# Says what was measured, and whether it is as claimed.
Check = Callable[[list[Row]], tuple[str, bool]]


class Claim(NamedTuple):
    text: str
    about: Callable[[Row], bool]
    check: Check
    also_raised: bool = False  # whether it is about rows that raised, too

    def verdict(self, rows: Sequence[Row]) -> Verdict:
        about = [r for r in rows if self.about(r) and (self.also_raised or not r.raised)]
        of_peers = by((row for row in about if row.layer not in OURS), lambda row: row.layer)
        unlike = [name for name, found in of_peers.items() if not self.check(found)[1]]
        ours = [row for row in about if row.layer in OURS]
        measured, holds = self.check(ours) if ours else ("-", None)
        return Verdict(self.text, measured, holds, unlike=", ".join(unlike))


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Returns the rows that differ only in how they were run, together."""
    return list(by(rows, lambda row: (row.layer, row.dtype, row.shape, row.batch)).values())


def _every(as_claimed: Callable[[Row], bool]) -> Check:
    def check(rows: list[Row]) -> tuple[str, bool]:
        wrong = [row for row in rows if not as_claimed(row)]
        said = f"in {len(rows) - len(wrong)} of {len(rows)} rows"
        return said + (f"; not {_where(wrong[0])}" if wrong else ""), not wrong

    return check


def _where(row: Row) -> str:
    return f"{row.values}, {row.way}, {'with backward' if row.backward else 'forward'}"


def _taken_in(error: Callable[[Row], float]) -> Check:
    def check(rows: list[Row]) -> tuple[str, bool]:
        # What one of two updates has taken in cannot be told; claim 3 is about those.
        rows = [row for row in rows if _one_update(row)]
        if not rows:
            return "no row made one update", False
        largest, row = worst(rows, error)
        return f"{largest:.1e} in {len(rows)} rows ({_where(row)})", largest <= CLOSE

    return check


def _one_update(row: Row) -> bool:
    # NaN: Equinox's first in mode="ema" replaces what was there, and cannot be counted.
    return all(abs(n - 1) < 0.5 or np.isnan(n) for n in (row.updates_1, row.updates_2))


def _same_bits(rows: list[Row]) -> tuple[str, bool]:
    patterns = [len({row.memory_1 for row in group}) for group in groups(rows)]
    said = f"{len(rows)} rows of {len(patterns)} kinds: {_range(patterns)} pattern of bits each"
    return said, max(patterns) == 1


def _same_bits_next(rows: list[Row]) -> tuple[str, bool]:
    # memory + share * (batch - memory) is rounded twice op by op, and once where a compiler
    # makes one instruction of it. For values of one sign that is 1 ulp of the larger, at most.
    patterns, apart = [], []
    for group in groups(rows):
        for compiled in (True, False):
            memories = {row.memory_2 for row in group if WAYS[row.way].compiled == compiled}
            patterns += [len(memories)] if memories else []
        before = means_and_variances(group[0].memory_1)
        after = [means_and_variances(row.memory_2) for row in group]
        ulp = np.spacing(np.max(np.abs([before, *after]), 0))
        apart.append((np.ptp(after, 0) / ulp).max())
    # Of which NaN is the largest.
    most = np.max(apart)
    said = f"{len(rows)} rows: {_range(patterns)} pattern each, {most:.2g} ulp between the two"
    return said, bool(max(patterns) == 1 and most <= 1)


def _same_difference(rows: list[Row]) -> tuple[str, bool]:
    differences = [[row.difference for row in group] for group in groups(rows)]
    spread = np.max([np.ptp(group) / max(1, np.max(group)) for group in differences])
    least = np.min(np.concatenate(differences))
    said = f"{len(rows)} rows: by {least:.2g} or more, the same to {spread:.1e}"
    return said, bool(least > 0 and spread <= CLOSE)


def _range(counts: list[int]) -> str:
    least, most = min(counts), max(counts)
    return str(most) if least == most else f"{least} to {most}"


def _finite(row: Row) -> bool:
    return row.batch == FINITE


def _has_no_variance(row: Row) -> bool:
    return row.n == 1 and row.unbiased


def _refused(row: Row) -> bool:
    untouched = row.memory_0 == row.memory_1
    return row.raised.startswith("ValueError") and row.while_tracing and untouched


CLAIMS = (
    Claim(
        "1. it runs (but see 10)",
        lambda row: not _has_no_variance(row),
        _every(lambda row: not row.raised),
        also_raised=True,
    ),
    Claim(
        "2. evaluation never changes the memory",
        lambda row: True,
        _every(lambda row: not row.evaluation_changed),
        also_raised=True,
    ),
    Claim("3. one training call is one update", _finite, _every(_one_update)),
    Claim("4. of the same bits, however it is run", _finite, _same_bits),
    Claim("5. the next too; op by op and compiled, to 1 ulp", _finite, _same_bits_next),
    Claim("6. evaluation then differs, by the same to 1e-6", _finite, _same_difference),
    Claim(
        "7. an update takes in the batch's mean, to 1e-6",
        _finite,
        _taken_in(lambda row: row.mean_error),
    ),
    Claim(
        "8. and the variance that `unbiased` says, to 1e-6",
        lambda row: _finite(row) and not _has_no_variance(row),
        _taken_in(lambda row: row.variance_error),
    ),
    Claim(
        "9. n = 1: nothing is NaN, neither now nor later",
        lambda row: row.n == 1,
        _every(lambda row: row.nonfinite_training == row.nonfinite_evaluation == 0),
    ),
    Claim(
        "10. n = 1, unbiased: ValueError while tracing, state as it was",
        _has_no_variance,
        _every(_refused),
        also_raised=True,
    ),
    Claim(
        "11. a batch with NaN, inf: memory as it was, batch counted",
        lambda row: not _finite(row),
        _every(lambda row: row.memory_1 == row.memory_2 and row.rejected == 1),
    ),
    Claim(
        "12. and all is finite ten batches later",
        lambda row: not _finite(row),
        _every(lambda row: row.nonfinite_later == row.nonfinite_evaluation == 0),
    ),
)
