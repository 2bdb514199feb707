"""`Ledger` writes the rows of a run to a file that survives the run's death; `read` reads it.

The file has lines of JSON. The first says by what it was written; each other is a `Row`; the
last field of each line is a checksum of what comes before it in the line. The file is only ever
appended to, so that its first lines are a ledger, too. Values that were kept are in a folder
beside it, one file of plain bytes a step, which is on the disk before the rows that need it.
"""

import contextlib
import errno
import json
import math
import operator
import os
import re
import stat
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ._fingerprint import hexadecimal, of_numpy
from ._record import Plan, Record, places

_FORMAT, _VERSION = "eqx_norm.determinism ledger", 2
_CHECKSUM = b',"crc":"%08x"}\n'
# Bytes of a line at most, of which its probe's name is all but some hundred.
_LONGEST_LINE = 2**16
# Bytes of a file at most: some 25 million rows, which take three times as much in memory.
_LARGEST_FILE = 2**32

# Where there is no such flag there is nothing that it would keep from waiting, or following.
_DO_NOT_WAIT = getattr(os, "O_NONBLOCK", 0)
_DO_NOT_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class Row(NamedTuple):
    """Says what one probe saw in one step. `fingerprint` is `None` where it was not passed."""

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
    def place(self) -> str:
        return f"step {self.step}: {self.label}"


class LedgerError(ValueError):
    """Tells of a file that is no ledger, is damaged, or is of another program."""


def printable(text: str) -> str:
    """Returns the text with escapes for what would end a line or steer a terminal."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def _folder_of_values(path: Path) -> Path:
    return Path(f"{path}.values")


# --- Writing.


class Ledger:
    """Writes a file of rows, one for each probe and step, to compare with another run's.

    ```python
    with Ledger("a.jsonl") as ledger:
        ...
        ledger.append(i, record)
    ```

    A step's rows are written together, and `append` returns once the system says that they are
    on the disk (`fsync`): a run that is killed, even by the loss of power, leaves all steps
    that it has appended, and perhaps a part of the next, of which readers leave out an
    incomplete last line. Where `append` fails, on a full disk, say, what it has written of the
    step is taken back, and it may be called again.

    Values that were kept are in the folder `a.jsonl.values/`, which belongs to the ledger: who
    renames or deletes the one does so with the other.

    **Arguments:**

    - `path`: of the file to make. One that is there is never written over, nor are values
        that were kept for one of that name.

    **Raises:** `FileExistsError` for such a file or folder.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._values = _folder_of_values(self.path.absolute())
        for taken in (self.path, self._values):
            if os.path.lexists(taken):
                raise FileExistsError(
                    f"Ledger({str(path)!r}): there is {taken}, and neither a ledger nor the "
                    "values kept beside it are written over. Give another name, or delete both "
                    "if the run is not needed any more."
                )
        device = jax.devices()[0]
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "jax": jax.__version__,
            "platform": device.platform,
            "device": device.device_kind,
        }
        # Without a buffer, in which a step that could not be written would be left.
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 (`close` closes it)
        self._has_values = False
        self._end = 0  # of the last line that is whole
        self._steps: set[int] = set()
        # Callbacks come from threads of XLA's.
        self._lock = threading.Lock()
        try:
            self._write(_encoded(header))
            _sync(self.path.parent)
        except BaseException:
            self._file.close()
            with contextlib.suppress(OSError):
                self.path.unlink()
            raise

    def append(self, step: SupportsIndex, record: Record) -> None:
        """Writes the rows of one step, and waits until the system has them on the disk.

        **Arguments:**

        - `step`: its number, one that this ledger does not have yet.
        - `record`: what `recorded` gave.

        **Raises:** `ValueError` for a step that is there already, for a record of several
        steps or members, for a probe's name that makes a line of more than 64 KiB, and for a
        ledger that has been closed; `OSError` where it cannot be written. The ledger is then
        as it was before.
        """
        if record.fingerprints.ndim != 2:
            raise ValueError(
                f"ledger.append({step}, record): the record's rows have the shape "
                f"{record.fingerprints.shape}, those of a step (rows, 2). Take one out of a "
                "vmap or scan by jax.tree.map(lambda a: a[i], record)."
            )
        values = tuple(map(np.asarray, record.values))
        self.write(operator.index(step), record.plan, np.asarray(record.fingerprints), values)

    def write(
        self,
        step: int,
        plan: Plan,
        fingerprints: NDArray[np.uint32],
        values: tuple[NDArray[Any], ...],
    ) -> None:
        """Does what `append` does, with the parts of a record, on the host."""
        rows, kept = [], []
        for place, pair in zip(places(plan), fingerprints, strict=True):
            name, kind, shape, dtype, _ = place.probe
            # Sums of 0 are those of a branch that was not taken, or of no values.
            passed = hexadecimal(pair) if pair.any() or 0 in shape else None
            where = (step, name, kind, place.iteration, place.again)
            rows.append(Row(*where, passed, shape, dtype, None))
            if values:
                kept.append(values[place.number][place.iteration])
        with self._lock:
            if self._file.closed:
                raise ValueError(f"{self.path} has been closed: step {step} comes too late.")
            if step in self._steps:
                raise ValueError(
                    f"{self.path} has a step {step} already. Count the steps through, or give "
                    "each run a ledger of its own."
                )
            if kept:
                rows = self._keep(step, rows, kept)
            self._write(b"".join(_encoded(row._asdict()) for row in rows))
            self._steps.add(step)

    def close(self) -> None:
        """Waits for the callbacks that are under way, and closes the file."""
        jax.effects_barrier()
        with self._lock:
            self._file.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, lines: bytes) -> None:
        """Writes lines to the end of the file: all of them, or none."""
        rest = memoryview(lines)
        try:
            self._take_back()
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):  # before the next it is tried again
                self._take_back()
            raise
        self._end += len(lines)

    def _take_back(self) -> None:
        """Removes what was written of lines that could not be written whole."""
        if self._file.seek(0, os.SEEK_END) != self._end:
            self._file.truncate(self._end)
            self._file.seek(self._end)

    def _keep(self, step: int, rows: list[Row], values: list[NDArray[Any]]) -> list[Row]:
        """Writes the values of a step to a file, and returns the rows with their places in it.

        The file is on the disk before the rows are written.
        """
        if not self._has_values:
            self._values.mkdir()
            self._has_values = True
            _sync(self._values.parent)
        path = self._values / str(step)
        unfinished = path.with_suffix(".unfinished")
        kept = []
        try:
            with open(unfinished, "wb") as file:
                for row, x in zip(rows, values, strict=True):
                    if row.fingerprint is None:
                        kept.append(row)
                        continue
                    kept.append(row._replace(values=(file.tell(), x.nbytes)))
                    # NumPy's formats do not know JAX's small floats: bytes.
                    file.write(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        _sync(self._values)
        return kept


def _sync(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, without which a new file is not."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _encoded(line: dict[str, Any]) -> bytes:
    text = json.dumps(line, separators=(",", ":")).encode()[:-1]
    text += _CHECKSUM % zlib.crc32(text)
    if len(text) > _LONGEST_LINE:
        raise ValueError(
            f"A row of {len(text)} bytes cannot be read again: {_LONGEST_LINE} is the most. "
            f"Give the probe {line['probe'][:40]!r}... a shorter name."
        )
    return text


# --- Reading.


class Contents(NamedTuple):
    """Holds what is in a ledger: its rows, by step and then in the order of the program."""

    path: Path
    header: dict[str, Any]
    rows: tuple[Row, ...]
    is_truncated: bool  # its last line is incomplete: the run was killed

    def values(self, row: Row) -> NDArray[Any] | None:
        """Returns the values that were kept for a row, or `None`; for keys, their data.

        **Raises:** `LedgerError` where they cannot be read, or are not those that the row has
        the fingerprint of.
        """
        if row.values is None or row.fingerprint is None:
            return None
        # Beside the file, and not beside a link to it.
        folder = _folder_of_values(self.path.resolve())
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
                f"{self.path} has values kept in {file}, which are not those that {row.place} "
                f"saw: their fingerprint is {found}, and its {row.fingerprint}. They are "
                "damaged, or another run's."
            )
        return values


def read(path: str | os.PathLike[str]) -> Contents:
    """Returns what is in a ledger.

    An incomplete last line, as a killed run leaves it, is left out. The file is read to where
    its end was when it was opened. A line has at most 64 KiB, and the file 4 GiB.

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


def _lines(path: Path) -> Iterator[bytes]:
    """Yields each line of a file, with its end."""
    try:
        with _opened(path) as file:
            # No further than it was then: a run that is under way may be writing it.
            left = os.fstat(file.fileno()).st_size
            if left > _LARGEST_FILE:
                raise LedgerError(
                    f"{path} has {left} bytes, and a ledger that is read has {_LARGEST_FILE} "
                    "at most. Compare a part of the run: its first lines are a ledger, too."
                )
            while left and (line := file.readline(min(left, _LONGEST_LINE + 1))):
                if len(line) > _LONGEST_LINE:
                    raise LedgerError(
                        f"{path} is no ledger: it has a line of more than {_LONGEST_LINE} "
                        "bytes."
                    )
                left -= len(line)
                yield line
    except LedgerError:
        raise
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path} cannot be read ({_reason(error)}).") from None


def _opened(path: Path, flags: int = 0) -> BinaryIO:
    """Opens a regular file, and does not wait for the writer of a pipe."""

    def opener(name: str, mode: int) -> int:
        descriptor = os.open(name, mode | flags | _DO_NOT_WAIT)
        kind = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # `open` itself refuses folders
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no regular file")
        return descriptor

    return open(path, "rb", opener=opener)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _header(path: Path, line: bytes) -> dict[str, Any]:
    header = _decoded(line)
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise LedgerError(
            f"{path} is no ledger: its first line is not that of one. Ledgers are written by "
            "eqx_norm.determinism.Ledger."
        )
    version = header.get("version")
    if type(version) is not int or version != _VERSION:
        raise LedgerError(
            f"{path} is a ledger of version {version}, and this eqx_norm reads "
            f"version {_VERSION}."
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
    if isinstance(fields, dict) and fields.get("format") == _FORMAT:
        raise LedgerError(
            f"{path} has a second ledger from line {number} on. Compare each run in a file of "
            "its own."
        )
    # A right checksum alone does not say that it is a row.
    if isinstance(fields, dict) and set(fields) == set(Row._fields):
        parts: Any = {k: tuple(v) if type(v) is list else v for k, v in fields.items()}
        row = Row(**parts)
        if _is_sound(row):
            return row
    raise LedgerError(f"{path} is damaged: line {number} is not that of a probe.")


def _is_sound(row: Any) -> bool:
    def are_counts(numbers: Any) -> bool:
        return type(numbers) is tuple and all(type(n) is int and n >= 0 for n in numbers)

    def is_text(text: Any, pattern: str) -> bool:
        return isinstance(text, str) and re.fullmatch(pattern, text, re.DOTALL) is not None

    return (
        type(row.step) is int
        and is_text(row.probe, ".+")
        and is_text(row.kind, "forward|tangent|cotangent")
        and are_counts(row.iteration)
        and are_counts((row.again,))
        and (row.fingerprint is None or is_text(row.fingerprint, "[0-9a-f]{16}"))
        and are_counts(row.shape)
        and is_text(row.dtype, ".+")
        and (row.values is None or (are_counts(row.values) and len(row.values) == 2))
    )


def _decoded(line: bytes) -> Any:
    """Returns what the JSON of a line says; `None` where its checksum is wrong."""
    text = line[: -len(_CHECKSUM % 0)]
    if line != text + _CHECKSUM % zlib.crc32(text):
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
