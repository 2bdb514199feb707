"""What this layer claims of its state, and which of the other layers it is not so with."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from .lab.peers.names import OURS
from .state_consistency_layers import BY_NAME, UNBIASED
from .state_consistency_rows import FINITE, Row, Setting, means_and_variances
from .state_consistency_ways import WAYS

# float32 has a relative precision of 6e-8: a few roundings.
CLOSE = 1e-6


class Verdict(NamedTuple):
    claim: str
    measured: str
    holds: bool | None  # None: none of its rows was run
    not_so_with: str


# What was measured, and whether it is as claimed.
Check = Callable[[list[Row]], tuple[str, bool]]


class Claim(NamedTuple):
    text: str
    about: Callable[[Setting], bool]
    check: Check
    also_raised: bool = False  # whether it is about rows that raised, too

    def of(self, rows: Iterable[Row], layers: Iterable[str]) -> list[Row]:
        return [
            (setting, found)
            for setting, found in rows
            if setting.layer in layers
            and self.about(setting)
            and (self.also_raised or not found.raised)
        ]

    def judge(self, rows: list[Row]) -> Verdict:
        peers = dict.fromkeys(s.layer for s, _ in rows if s.layer not in (OURS, UNBIASED))
        fail = [name for name in peers if self._fails(self.of(rows, (name,)))]
        ours = self.of(rows, (OURS, UNBIASED))
        said, holds = self.check(ours) if ours else ("none of its rows was run", None)
        return Verdict(self.text, said, holds, ", ".join(fail) or "-")

    def _fails(self, rows: list[Row]) -> bool:
        return bool(rows) and not self.check(rows)[1]


def _finite(setting: Setting) -> bool:
    return setting.batch == FINITE


def _has_no_variance(setting: Setting) -> bool:
    return setting.n == 1 and BY_NAME[setting.layer].unbiased


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows that differ only in how they were run."""
    found: defaultdict[object, list[Row]] = defaultdict(list)
    for setting, row in rows:
        found[setting.layer, setting.dtype, setting.shape, setting.batch].append((setting, row))
    return list(found.values())


def _every(as_claimed: Callable[[Row], bool]) -> Check:
    def check(rows: list[Row]) -> tuple[str, bool]:
        wrong = [setting for setting, found in rows if not as_claimed((setting, found))]
        said = f"in {len(rows) - len(wrong)} of {len(rows)} rows"
        return said + (f"; not {_where(wrong[0])}" if wrong else ""), not wrong

    return check


def _where(setting: Setting) -> str:
    shape = "x".join(map(str, setting.shape))
    backward = "with backward" if setting.backward else "forward"
    return f"{setting.dtype} {shape}, {setting.way}, {backward}"


def _taken_in(error: Callable[[Row], float]) -> Check:
    def check(rows: list[Row]) -> tuple[str, bool]:
        # What one of two updates has taken in cannot be told; claim 3 is about those.
        rows = [row for row in rows if _one_update(row)]
        if not rows:
            return "no row made one update", False
        # NaN, which is neither large nor small, argmax takes for the largest.
        worst = rows[int(np.argmax([error(row) for row in rows]))]
        said = f"{error(worst):.1e} in {len(rows)} rows ({_where(worst[0])})"
        return said, bool(error(worst) <= CLOSE)

    return check


def _one_update(row: Row) -> bool:
    # NaN: Equinox's first in mode="ema" replaces what was there, and cannot be counted.
    counts = [row[1].updates_1, row[1].updates_2]
    return all(abs(count - 1) < 0.5 or np.isnan(count) for count in counts)


def _same_bits(rows: list[Row]) -> tuple[str, bool]:
    patterns = [len({found.memory_1 for _, found in group}) for group in groups(rows)]
    said = f"{len(rows)} rows of {len(patterns)} kinds: {_range(patterns)} pattern of bits each"
    return said, max(patterns) == 1


def _same_bits_next(rows: list[Row]) -> tuple[str, bool]:
    # memory + share * (batch - memory) is rounded twice op by op, and once where a compiler
    # makes one instruction of it. For values of one sign that is 1 ulp of the larger, at most.
    patterns, apart = [], []
    for group in groups(rows):
        by_compiled: dict[bool, set[str]] = {True: set(), False: set()}
        for setting, found in group:
            by_compiled[WAYS[setting.way].compiled].add(found.memory_2)
        patterns += [len(memories) for memories in by_compiled.values() if memories]
        before = means_and_variances(group[0][1].memory_1)
        after = [means_and_variances(found.memory_2) for _, found in group]
        ulp = np.spacing(np.max(np.abs([before, *after]), 0))
        apart.append((np.ptp(after, 0) / ulp).max())
    # Of which NaN is the largest.
    most = np.max(apart)
    said = f"{len(rows)} rows: {_range(patterns)} pattern each, {most:.2g} ulp between the two"
    return said, bool(max(patterns) == 1 and most <= 1)


def _same_difference(rows: list[Row]) -> tuple[str, bool]:
    differences = [[found.difference for _, found in group] for group in groups(rows)]
    spread = np.max([np.ptp(group) / max(1, np.max(group)) for group in differences])
    least = np.min(np.concatenate(differences))
    said = f"{len(rows)} rows: by {least:.2g} or more, the same to {spread:.1e}"
    return said, bool(least > 0 and spread <= CLOSE)


def _range(counts: list[int]) -> str:
    least, most = min(counts), max(counts)
    return str(most) if least == most else f"{least} to {most}"


def variance_error(row: Row) -> float:
    """Beside the variance that the layer says it remembers."""
    setting, found = row
    return found.unbiased_error if BY_NAME[setting.layer].unbiased else found.biased_error


def _refused(row: Row) -> bool:
    found = row[1]
    untouched = found.memory_0 == found.memory_1
    return found.raised.startswith("ValueError") and found.while_tracing and untouched


def _all_finite(row: Row) -> bool:
    return row[1].nonfinite_training == row[1].nonfinite_evaluation == 0


def _kept_and_counted(row: Row) -> bool:
    found = row[1]
    return found.memory_1 == found.memory_2 and found.rejected == 1


CLAIMS = (
    Claim(
        "1. it runs (but see 10)",
        lambda setting: not _has_no_variance(setting),
        _every(lambda row: not row[1].raised),
        also_raised=True,
    ),
    Claim(
        "2. evaluation never changes the memory",
        lambda setting: True,
        _every(lambda row: not row[1].evaluation_changed),
        also_raised=True,
    ),
    Claim("3. one training call is one update", _finite, _every(_one_update)),
    Claim("4. of the same bits, however it is run", _finite, _same_bits),
    Claim("5. the next too; op by op and compiled, to 1 ulp", _finite, _same_bits_next),
    Claim("6. evaluation then differs, by the same to 1e-6", _finite, _same_difference),
    Claim(
        "7. an update takes in the batch's mean, to 1e-6",
        _finite,
        _taken_in(lambda row: row[1].mean_error),
    ),
    Claim(
        "8. and the variance that `unbiased` says, to 1e-6",
        lambda setting: _finite(setting) and not _has_no_variance(setting),
        _taken_in(variance_error),
    ),
    Claim(
        "9. n = 1: nothing is NaN, neither now nor later",
        lambda setting: setting.n == 1,
        _every(_all_finite),
    ),
    Claim(
        "10. n = 1, unbiased: ValueError while tracing, state as it was",
        _has_no_variance,
        _every(_refused),
        also_raised=True,
    ),
    Claim(
        "11. a batch with NaN, inf: memory as it was, batch counted",
        lambda setting: not _finite(setting),
        _every(_kept_and_counted),
    ),
    Claim(
        "12. and all is finite ten batches later",
        lambda setting: not _finite(setting),
        _every(lambda row: row[1].nonfinite_later == row[1].nonfinite_evaluation == 0),
    ),
)


def judge(rows: list[Row]) -> list[Verdict]:
    return [claim.judge(rows) for claim in CLAIMS]
