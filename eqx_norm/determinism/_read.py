"""A ledger, read from its file."""

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ._ledger import CHECKSUM, FORMAT, VERSION


class LedgerError(ValueError):
    """A file that is no ledger, is damaged, or is not of the same program as another."""


class Row(NamedTuple):
    """What one probe saw in one step. `fingerprint` is `None` where it was not passed."""

    step: int
    probe: str
    kind: str
    iteration: tuple[int, ...]
    again: int
    fingerprint: str | None
    shape: tuple[int, ...]
    dtype: str
    values: tuple[str, str] | None

    @property
    def label(self) -> str:
        loops = f", iteration {'.'.join(map(str, self.iteration))}" if self.iteration else ""
        again = f", time {self.again}" if self.again > 1 else ""
        return f"`{self.probe}` {self.kind}{loops}{again}"

    @property
    def key(self) -> tuple[Any, ...]:
        return self.step, self.probe, self.kind, self.iteration, self.again


class Contents(NamedTuple):
    """What is in a ledger: its rows, by step and then in the order of the program."""

    path: Path
    header: dict[str, Any]
    rows: tuple[Row, ...]
    is_truncated: bool  # its last line is incomplete: the run was killed

    def values(self, row: Row) -> NDArray[Any] | None:
        """Those that were kept of a row: bits, for what NumPy has no dtype for."""
        if row.values is None:
            return None
        file, name = row.values
        try:
            with open(self.path.parent / file, "rb") as opened, np.load(opened) as arrays:
                raw = arrays[name]
            if row.dtype.startswith("key<"):
                return raw.view(np.uint32)
            return raw.view(jnp.dtype(row.dtype)).reshape(row.shape)
        except Exception as error:  # zipfile and NumPy have one of their own for each damage
            raise LedgerError(
                f"{self.path} names the values in {file}, which cannot be read ({error})."
            ) from None


def read(path: str | os.PathLike[str]) -> Contents:
    """What is in a ledger. An incomplete last line, as a killed run leaves it, is left out.

    **Raises:** `LedgerError` for a file that cannot be read, is no ledger, is of another
    version, or is damaged, saying where.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LedgerError(f"{path} cannot be read ({error.strerror}).") from None
    *lines, rest = content.split(b"\n")
    if not lines:
        raise LedgerError(
            f"{path} is no ledger, or one of a run that was killed before it had written the "
            "first line."
        )
    header = _header(path, lines[0])
    rows = list(_rows(path, lines[1:]))
    last: dict[int, int] = {}
    for i, row in enumerate(rows):
        if row.step in last and last[row.step] != i - 1:
            raise LedgerError(f"{path} has the step {row.step} twice.")
        last[row.step] = i
    # With callbacks, one step may be written before another; the sort is stable.
    rows.sort(key=lambda row: row.step)
    return Contents(path, header, tuple(rows), bool(rest))


def _header(path: Path, line: bytes) -> dict[str, Any]:
    header = _decoded(line)
    if header is None or header.get("format") != FORMAT:
        raise LedgerError(
            f"{path} is no ledger: its first line is not that of one. Ledgers are written by "
            "eqx_norm.determinism.Ledger."
        )
    if header["version"] != VERSION:
        raise LedgerError(
            f"{path} is a ledger of version {header['version']}, and this eqx_norm reads "
            f"version {VERSION}."
        )
    return header


def _rows(path: Path, lines: list[bytes]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=2):
        fields = _decoded(line)
        if fields is None:
            raise LedgerError(
                f"{path} is damaged: the checksum of line {number} is not that of what is in "
                "it. (Only the last line may be incomplete.)"
            )
        tuples: Any = {k: tuple(v) if type(v) is list else v for k, v in fields.items()}
        yield Row(**tuples)


def _decoded(line: bytes) -> Any:
    text = line[: 1 - len(CHECKSUM % 0)]
    if line + b"\n" != text + CHECKSUM % zlib.crc32(text):
        return None
    return json.loads(text + b"}")
