"""Relates this layer's numbers to others' on the same array."""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.lab.claims import NotMeasured
from experiments.lab.peers import names

from .cases import FIRST, IN_TORCH, LAST
from .rows import Row, chosen, measured

Rows = Sequence[Row]

# Two timings of one program lie apart by a little, depending on where its arrays lie. What is
# slower by no more than this, or within the spread, is not called slower.
APART = 1.03


class Ratio(NamedTuple):
    """Holds this layer's number over another's."""

    value: float
    ours: Row
    other: Row

    @property
    def slower(self) -> bool:
        """Returns whether it is slower, beyond what two timings of one program differ by."""
        return self.value > APART and self.ours.low > self.other.high

    def __str__(self) -> str:
        beside = "" if self.ours.peer == names.OURS else f" ({self.ours.peer})"
        return f"{self.value:.2f} of {self.other.peer} on {self.ours.where}{beside}"


VALUE = operator.attrgetter("value")


def ratios(
    rows: Rows,
    others: Sequence[str],
    *,
    of: str = "median",
    ours: Sequence[str] = (names.OURS,),
) -> list[Ratio]:
    """Returns, array by array, our number over the least of the others'."""
    found = []
    known = measured(rows, of)
    for mine in (row for name in ours for row in chosen(known, peer=name)):
        theirs = [row for row in known if row.peer in others and _beside(mine, row)]
        if theirs:
            best = min(theirs, key=operator.attrgetter(of))
            found.append(Ratio(getattr(mine, of) / getattr(best, of), mine, best))
    return found


def mean(found: Sequence[Ratio]) -> float:
    """Returns the geometric mean; without ratios, raises `NotMeasured`."""
    if not found:
        raise NotMeasured
    return math.exp(np.mean([math.log(ratio.value) for ratio in found]))


def _beside(mine: Row, other: Row) -> bool:
    """Returns whether both are of one array; where channels are last, torch may choose."""
    same = operator.attrgetter("part", "shape", "dtype", "program", "cache")
    chosen_by_torch = (mine.layout, other.layout) == (LAST, FIRST) and other.peer in IN_TORCH
    return same(mine) == same(other) and (mine.layout == other.layout or chosen_by_torch)
