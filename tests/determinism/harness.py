"""Writes ledgers and forges them, for several tests of the probe."""

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eqx_norm.determinism import Ledger, Record, monitor, read
from tests.helpers import normal

X = normal(0, (2, 3))


def tree(x: Any) -> Any:
    """Returns a tree that is monitored: the rows `in.half`, `in.key` and `in.x`."""
    return monitor({"x": x, "half": x.astype(jnp.bfloat16), "key": jax.random.key(3)}, "in")


def written(path: Path, *records: Record, start: int = 0) -> Path:
    """Writes a ledger of these steps, and returns its path."""
    with Ledger(path) as ledger:
        for step, record in enumerate(records, start):
            ledger.append(step, record)
    return path


def rows_of(path: Path, *records: Record) -> tuple[Any, ...]:
    """Returns the rows of these steps as they are read from a ledger."""
    return read(written(path, *records)).rows


def forge(path: Path, line: int, **fields: Any) -> None:
    """Changes fields in one line of a ledger, and makes its checksum right."""
    lines = path.read_bytes().splitlines(keepends=True)
    changed = {**json.loads(lines[line]), **fields}
    del changed["crc"]
    text = json.dumps(changed)[:-1].encode()
    lines[line] = text + b',"crc":"%08x"}\n' % zlib.crc32(text)
    path.write_bytes(b"".join(lines))
