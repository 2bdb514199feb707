"""Judges claims by what was measured."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .tables import table

Row = TypeVar("Row")

WORDS = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}


class NotMeasured(Exception):  # noqa: N818 (it is an answer, not an error)
    """Raised by a claim whose rows were not asked for."""


class Verdict(NamedTuple):
    claim: str
    measured: str
    holds: bool | None  # None: nothing was measured to judge it by
    quick: bool = True  # whether --quick fails where it does not hold
    unlike: str = ""  # the peers for which it does not hold


class Claim(NamedTuple):
    """Holds a sentence, and `judge(measured)`, which returns what was found and if it holds."""

    text: str
    judge: Callable[[Any], tuple[str, bool]]
    quick: bool = True  # whether --quick measures it, and fails where it does not hold

    def verdict(self, measured: Any) -> Verdict:
        try:
            found, holds = self.judge(measured)
        except NotMeasured:
            return Verdict(self.text, "-", None, self.quick)
        return Verdict(self.text, found, bool(holds), self.quick)


def judge(claims: Iterable[Claim], measured: Any) -> list[Verdict]:
    return [claim.verdict(measured) for claim in claims]


def worst(rows: Sequence[Row], error: Callable[[Row], float]) -> tuple[float, Row]:
    """Returns the largest error, and its row; without rows, raises `NotMeasured`."""
    if not rows:
        raise NotMeasured
    # NaN, which is neither large nor small, argmax takes for the largest.
    row = rows[int(np.argmax([error(row) for row in rows]))]
    return error(row), row


def verdicts_table(
    verdicts: Sequence[Verdict], claim: str = "claim", measured: str = "measured"
) -> str:
    """Returns the verdicts as a table; `claim` and `measured` head its first two columns."""
    header = [claim, measured, "verdict"]
    rows = [[v.claim, v.measured, WORDS[v.holds]] for v in verdicts]
    if any(verdict.unlike for verdict in verdicts):
        header.append("not so with")
        rows = [[*row, v.unlike or "-"] for row, v in zip(rows, verdicts, strict=True)]
    return table(header, rows)
