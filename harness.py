"""Writes ledgers, for several tests of the probe."""

from pathlib import Path
from typing import Any

from eqx_norm.determinism import Ledger, Record, read
from tests.helpers import normal

X = normal(0, (2, 3))


def written(path: Path, *records: Record, start: int = 0) -> Path:
    """Writes a ledger of these steps, and returns its path."""
    with Ledger(path) as ledger:
        for step, record in enumerate(records, start):
            ledger.append(step, record)
    return path


def rows_of(path: Path, record: Record) -> tuple[Any, ...]:
    """Returns the rows of a step as they are read from a ledger."""
    return read(written(path, record)).rows
