"""A ledger, read from its file."""

import contextlib
import errno
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ._fingerprint import hexadecimal, of_numpy
from ._ledger import CHECKSUM, FORMAT, LONGEST_LINE, VERSION, folder_of_values

# Bytes of a file at most: some 25 million rows, which take three times as much in memory.
LARGEST_FILE = 2**32

# Where there is no such flag there is nothing that it would keep from waiting, or following.
_DO_NOT_WAIT = getattr(os, "O_NONBLOCK", 0)
_DO_NOT_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


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
    values: tuple[int, int] | None  # where they begin in the step's file, and how many bytes

    @property
    def label(self) -> str:
        loops = f", iteration {'.'.join(map(str, self.iteration))}" if self.iteration else ""
        again = f", time {self.again}" if self.again > 1 else ""
        return f"`{printable(self.probe)}` {self.kind}{loops}{again}"

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
        """Returns those that were kept of a row that was passed: of keys their data.

        **Raises:** `LedgerError` where they cannot be read, or are not those that the row has
        the fingerprint of.
        """
        if row.values is None or row.fingerprint is None:
            return None
        # Beside the file, and not beside a link to it.
        folder = folder_of_values(self.path.resolve())
        file = folder / str(row.step)
        try:
            if folder.is_symlink():
                raise OSError(errno.ELOOP, "its folder is a link")
            values = _array(row, _part(file, *row.values))
            found = hexadecimal(of_numpy(values))
        except Exception as error:  # NumPy has one of its own for each shape and dtype
            raise LedgerError(
                f"{self.path} has values kept in {file}, which cannot be read "
                f"({_reason(error)})."
            ) from None
        if found != row.fingerprint:
            raise LedgerError(
                f"{self.path} has values kept in {file}, which are not those that step "
                f"{row.step}: {row.label} saw: their fingerprint is {found}, and its "
                f"{row.fingerprint}. They are damaged, or another run's."
            )
        return values


def read(path: str | os.PathLike[str]) -> Contents:
    """Returns what is in a ledger. An incomplete last line, as a killed run leaves it, is left
    out.

    It is read line by line, as long as it was when it was opened, and one line is 64 KiB at
    most, the whole 4 GiB.

    **Raises:** `LedgerError` for a file that cannot be read, is no ledger, is of another
    version, or is damaged, saying where.
    """
    path = Path(path)
    lines = _lines(path)
    first = next(lines, b"")
    if not first.endswith(b"\n"):
        raise LedgerError(
            f"{path} is no ledger, or one of a run that was killed before it had written the "
            "first line."
        )
    header = _header(path, first)
    rows, is_truncated = [], False
    for number, line in enumerate(lines, start=2):
        if line.endswith(b"\n"):
            rows.append(_row(path, number, line))
        else:
            is_truncated = True
    last: dict[int, int] = {}
    for i, row in enumerate(rows):
        if row.step in last and last[row.step] != i - 1:
            raise LedgerError(f"{path} has the step {row.step} twice.")
        last[row.step] = i
    # With callbacks, one step may be written before another; the sort is stable.
    rows.sort(key=lambda row: row.step)
    return Contents(path, header, tuple(rows), is_truncated)


def printable(text: str) -> str:
    """Returns the text with escapes for what would end a line or steer a terminal."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def _opened(path: Path, flags: int = 0) -> BinaryIO:
    """Opens a regular file; of a pipe it does not wait for a writer."""

    def opener(name: str, how: int) -> int:
        return os.open(name, how | flags | _DO_NOT_WAIT)

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "rb", opener=opener))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        stack.pop_all()
    return file


def _lines(path: Path) -> Iterator[bytes]:
    """Each line of a file, with its end."""
    try:
        with _opened(path) as file:
            # No further than it was then: a run that is under way may be writing it.
            left = os.fstat(file.fileno()).st_size
            if left > LARGEST_FILE:
                raise LedgerError(
                    f"{path} has {left} bytes, and a ledger that is read has {LARGEST_FILE} at "
                    "most. Compare a part of the run: its first lines are a ledger, too."
                )
            while left and (line := file.readline(min(left, LONGEST_LINE + 1))):
                if len(line) > LONGEST_LINE:
                    raise LedgerError(
                        f"{path} is no ledger: it has a line of more than {LONGEST_LINE} bytes."
                    )
                left -= len(line)
                yield line
    except LedgerError:
        raise
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path} cannot be read ({_reason(error)}).") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _header(path: Path, line: bytes) -> dict[str, Any]:
    header = _decoded(line)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise LedgerError(
            f"{path} is no ledger: its first line is not that of one. Ledgers are written by "
            "eqx_norm.determinism.Ledger."
        )
    version = header.get("version")
    if type(version) is not int or version != VERSION:
        raise LedgerError(
            f"{path} is a ledger of version {version}, and this eqx_norm reads "
            f"version {VERSION}."
        )
    for what in ("jax", "platform", "device"):
        if not isinstance(header.get(what), str):
            raise LedgerError(f"{path} is no ledger: its first line tells of no {what}.")
    return header


def _row(path: Path, number: int, line: bytes) -> Row:
    fields = _decoded(line)
    if fields is None:
        raise LedgerError(
            f"{path} is damaged: the checksum of line {number} is not that of what is in "
            "it. (Only the last line may be incomplete.)"
        )
    if isinstance(fields, dict) and fields.get("format") == FORMAT:
        raise LedgerError(
            f"{path} has a second ledger from line {number} on. Compare each run in a file of "
            "its own."
        )
    row = _row_of(fields)
    if row is None:
        raise LedgerError(f"{path} is damaged: line {number} is not that of a probe.")
    return row


def _row_of(fields: Any) -> Row | None:
    """Returns a row if that is what was written: a right checksum alone does not say so."""
    if not isinstance(fields, dict) or set(fields) != set(Row._fields):
        return None
    tuples: Any = {k: tuple(v) if type(v) is list else v for k, v in fields.items()}
    row = Row(**tuples)
    is_one = (
        type(row.step) is int
        and all(isinstance(text, str) and text for text in (row.probe, row.dtype))
        and row.kind in ("forward", "tangent", "cotangent")
        and _are_counts(row.iteration)
        and _are_counts((row.again,))
        and (row.fingerprint is None or _is_fingerprint(row.fingerprint))
        and _are_counts(row.shape)
        and (row.values is None or (_are_counts(row.values) and len(row.values) == 2))
    )
    return row if is_one else None


def _are_counts(numbers: Any) -> bool:
    return type(numbers) is tuple and all(type(n) is int and n >= 0 for n in numbers)


def _is_fingerprint(text: Any) -> bool:
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{16}", text) is not None


def _decoded(line: bytes) -> Any:
    """Returns what the JSON of a line says; `None` where its checksum is wrong."""
    text = line[: -len(CHECKSUM % 0)]
    if line != text + CHECKSUM % zlib.crc32(text):
        return None
    try:
        return json.loads(text.decode("ascii") + "}")
    except (ValueError, RecursionError):  # no JSON, a number of 5,000 digits, deep nesting
        return {}


def _part(path: Path, start: int, size: int) -> bytes:
    with _opened(path, _DO_NOT_FOLLOW) as file:
        if start + size > os.fstat(file.fileno()).st_size:
            raise EOFError("it is too short")
        file.seek(start)
        return file.read(size)


def _array(row: Row, raw: bytes) -> NDArray[Any]:
    if row.dtype.startswith("key<"):
        words = np.frombuffer(raw, np.uint32)
        return words.reshape(*row.shape, words.size // max(1, math.prod(row.shape)))
    dtype: np.dtype[Any] = jnp.dtype(row.dtype)
    return np.frombuffer(raw, dtype).reshape(row.shape)
