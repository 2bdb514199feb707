"""Writes ledgers and forges them, for several tests of the probe."""

import json
import zlib
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


def forge(path: Path, line: int, **fields: Any) -> None:
    """Changes fields in one line of a ledger, and makes its checksum right."""
    lines = path.read_bytes().splitlines(keepends=True)
    changed = {**json.loads(lines[line]), **fields}
    del changed["crc"]
    text = json.dumps(changed)[:-1].encode()
    lines[line] = text + b',"crc":"%08x"}\n' % zlib.crc32(text)
    path.write_bytes(b"".join(lines))
