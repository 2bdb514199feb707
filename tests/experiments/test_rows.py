"""Rows survive the way to a CSV file and back, to their digits."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.lab import rows


class Row(NamedTuple):
    name: str
    shape: tuple[int, ...]
    calls: int
    holds: bool
    error: float
    least: float | None = None


@dataclasses.dataclass(frozen=True)
class Other:
    name: str
    error: float = math.nan


FLOATS = st.floats(width=32, allow_nan=False)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"))
SHAPES = st.lists(st.integers(0, 9999)).map(tuple)
ROWS = st.builds(
    Row, TEXTS, SHAPES, st.integers(), st.booleans(), FLOATS, least=st.none() | FLOATS
)


@given(st.lists(ROWS))
def test_a_round_trip(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    rows.save(path, Row, written, digits=9)  # which tell all numbers of float32 apart
    read = rows.load(path, Row)
    assert [row[:4] for row in read] == [row[:4] for row in written]
    for a, b in zip(read, written, strict=True):
        assert np.float32(a.error) == np.float32(b.error)
        assert (a.least is None) == (b.least is None)


def test_digits_and_what_is_missing(tmp_path):
    path = tmp_path / "below" / "rows.csv"
    rows.save(path, Other, [Other("a, b", 1 / 3), Other("c")], digits=3)
    assert path.read_text() == 'name,error\n"a, b",0.333\nc,\n'
    first, second = rows.load(path, Other)
    assert first == Other("a, b", 0.333)
    assert math.isnan(second.error)
    path.write_text("name\na\n")
    with pytest.raises(KeyError, match="error"):
        rows.load(path, Other)
