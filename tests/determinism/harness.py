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


def sealed(text: bytes) -> bytes:
    """Returns a line of a ledger, with a checksum that is right."""
    return text + b',"crc":"%08x"}\n' % zlib.crc32(text)


def with_header(path: Path, **fields: Any) -> Path:
    """Gives a ledger another header."""
    first, *rest = path.read_bytes().splitlines(keepends=True)
    header = {**json.loads(first), **fields}
    del header["crc"]
    path.write_bytes(sealed(json.dumps(header)[:-1].encode()) + b"".join(rest))
    return path
