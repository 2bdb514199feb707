"""`Ledger` writes the rows of a run to a file that survives the run's death; `read` reads it.

The file has lines of JSON: a header that says what wrote it, then a `Row` each. The last field
of a line is a checksum of what is before it in the line. The file is only appended to, so that
its first lines are a ledger, too. Values that were kept are in a folder beside it, one file of
plain bytes a step, which is on the disk before the step's rows.
"""

import contextlib
import errno
import io
import json
import math
import operator
import os
import re
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ._fingerprint import hexadecimal, of_numpy
from ._record import Record, places

_FORMAT, _VERSION = "eqx_norm.determinism ledger", 2
# What the header tells of the run besides, each as text.
RAN_BY = ("jax", "platform", "device")
_CHECKSUM = b',"crc":"%08x"}\n'
# In bytes. The probe's name is all of a line but some hundred; a file has 25 million rows at
# most, which take three times as much in memory.
_LONGEST_LINE, _LARGEST_FILE = 2**16, 2**32


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
    """Says why a file is no ledger, is damaged, or is of another program."""


def printable(text: str) -> str:
    """Returns the text with escapes for what would end a line or steer a terminal."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


# --- Writing.


class Ledger:
    """Writes a file of rows, one for each probe and step, to compare with another run's.

    ```python
    with Ledger("a.jsonl") as ledger:
        ...
        ledger.append(i, record)
    ```

    A step's rows are written together, and `append` returns once they are on the disk
    (`fsync`): a run that is killed leaves all steps that it has appended, and perhaps a part of
    the next, whose incomplete last line readers leave out. Where `append` fails, on a full disk
    for example, the step is taken back, and may be appended again.

    Values that were kept are in the folder `a.jsonl.values/`: rename and delete the two
    together.

    **Arguments:**

    - `path`: of the file to make. One that is there is never written over, nor are values
        that were kept for one of that name.

    **Raises:** `FileExistsError` for such a file or folder.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._values = Path(f"{self.path.absolute()}.values")
        for taken in (self.path, self._values):
            if os.path.lexists(taken):
                raise FileExistsError(
                    f"Ledger({str(path)!r}): there is {taken}, and neither a ledger nor the "
                    "values kept beside it are written over. Give another name, or delete both "
                    "if the run is not needed any more."
                )
        device = jax.devices()[0]
        header = {"format": _FORMAT, "version": _VERSION, "jax": jax.__version__}
        header |= {"platform": device.platform, "device": device.device_kind}
        # Without a buffer, in which a step that could not be written would be left.
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 (`close` closes it)
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
        step, values = operator.index(step), [np.asarray(x) for x in record.values]
        prints = np.asarray(record.fingerprints)
        rows, kept = [], io.BytesIO()
        for place, pair in zip(places(record.plan), prints, strict=True):
            name, kind, shape, dtype, _ = place.probe
            where = (step, name, kind, place.iteration, place.again)
            # Sums of 0 are those of a branch that was not taken, or of no values.
            passed = hexadecimal(pair) if pair.any() or 0 in shape else None
            bounds = None
            if values and passed:
                # As bytes, since NumPy's formats do not know JAX's small floats.
                value = values[place.number][place.iteration].tobytes()
                bounds = kept.tell(), kept.write(value)
            rows.append(Row(*where, passed, shape, dtype, bounds))
        with self._lock:
            if self._file.closed:
                raise ValueError(f"{self.path} has been closed: step {step} comes too late.")
            if step in self._steps:
                raise ValueError(
                    f"{self.path} has a step {step} already. Count the steps through, or give "
                    "each run a ledger of its own."
                )
            if values:
                self._keep(step, kept.getvalue())
            self._write(b"".join(_encoded(row._asdict()) for row in rows))
            self._steps.add(step)

    def close(self) -> None:
        """Waits for the callbacks that are under way, and closes the file."""
        jax.effects_barrier()
        with self._lock:
            self._file.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *error: Any) -> None:
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
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def _keep(self, step: int, values: bytes) -> None:
        """Writes the values of a step to a file, which is on the disk when this returns."""
        self._values.mkdir(exist_ok=True)
        _sync(self._values.parent)
        path = self._values / str(step)
        try:
            with open(path, "wb") as file:
                file.write(values)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        _sync(self._values)


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
        file = Path(f"{self.path.resolve()}.values", str(row.step))
        damaged = f"{self.path} has values kept in {file}, which"
        try:
            values = _values(file, row, *row.values)
            found = hexadecimal(of_numpy(values))
        except Exception as error:  # NumPy has one of its own for each shape and dtype
            raise LedgerError(f"{damaged} cannot be read ({_reason(error)}).") from None
        if found != row.fingerprint:
            raise LedgerError(
                f"{damaged} are not those that {row.place} saw: their fingerprint is {found}, "
                f"and its {row.fingerprint}. They are damaged, or another run's."
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
    try:
        lines = enumerate(_lines(path), start=1)
        header = _header(next(lines, (1, b""))[1])
        rows, is_truncated = [], False
        for number, line in lines:
            if line.endswith(b"\n"):
                rows.append(_row(number, line))
            else:
                is_truncated = True
        last: dict[int, int] = {}
        for i, row in enumerate(rows):
            if last.get(row.step, i - 1) != i - 1:
                raise LedgerError(f"has the step {row.step} twice.")
            last[row.step] = i
    except LedgerError as error:
        raise LedgerError(f"{path} {error}") from None
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path} cannot be read ({_reason(error)}).") from None
    # With callbacks, one step may be written before another; the sort is stable.
    rows.sort(key=lambda row: row.step)
    return Contents(path, header, tuple(rows), is_truncated)


# Each of these raises a `LedgerError` that says what the file is or has; `read` names the file.


def _lines(path: Path) -> Iterator[bytes]:
    """Yields each line of a file, with its end."""
    with _opened(path) as file:
        # No further than it was then: a run that is under way may be writing it.
        left = os.fstat(file.fileno()).st_size
        if left > _LARGEST_FILE:
            raise LedgerError(
                f"has {left} bytes, and a ledger that is read has {_LARGEST_FILE} at most. "
                "Compare a part of the run: its first lines are a ledger, too."
            )
        while left and (line := file.readline(min(left, _LONGEST_LINE + 1))):
            if len(line) > _LONGEST_LINE:
                raise LedgerError(
                    f"is no ledger: it has a line of more than {_LONGEST_LINE} bytes."
                )
            left -= len(line)
            yield line


def _header(line: bytes) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise LedgerError(
            "is no ledger, or one of a run that was killed before it had written the first "
            "line."
        )
    header = _decoded(line)
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise LedgerError(
            "is no ledger: its first line is not that of one. Ledgers are written by "
            "eqx_norm.determinism.Ledger."
        )
    version = header.get("version")
    if type(version) is not int or version != _VERSION:
        raise LedgerError(
            f"is a ledger of version {version}, and this eqx_norm reads version {_VERSION}."
        )
    for what in RAN_BY:
        if not isinstance(header.get(what), str):
            raise LedgerError(f"is no ledger: its first line tells of no {what}.")
    return header


def _row(number: int, line: bytes) -> Row:
    fields = _decoded(line)
    if fields is None:
        raise LedgerError(
            f"is damaged: the checksum of line {number} is not that of what is in it. (Only "
            "the last line may be incomplete.)"
        )
    if isinstance(fields, dict):
        if fields.get("format") == _FORMAT:
            raise LedgerError(
                f"has a second ledger from line {number} on. Compare each run in a file of "
                "its own."
            )
        parts: Any = {k: tuple(v) if type(v) is list else v for k, v in fields.items()}
        if set(parts) == set(Row._fields) and _is_sound(row := Row(**parts)):
            return row
    raise LedgerError(f"is damaged: line {number} is not that of a probe.")


def _is_sound(row: Any) -> bool:
    """Returns whether a row is one of `Ledger`'s: a checksum that is right does not say so."""
    fingerprint = "0" * 16 if row.fingerprint is None else row.fingerprint
    values = (0, 0) if row.values is None else row.values
    texts = row.probe, row.kind, row.dtype, fingerprint
    counts = row.iteration, row.shape, (row.again,), values
    return (
        type(row.step) is int
        and all(type(text) is str and text for text in texts)
        and all(type(x) is tuple for x in counts)
        and all(type(n) is int and n >= 0 for x in counts for n in x)
        and row.kind in ("forward", "tangent", "cotangent")
        and re.fullmatch("[0-9a-f]{16}", fingerprint) is not None
        and len(values) == 2
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


# --- Values and files.


def _values(path: Path, row: Row, start: int, size: int) -> NDArray[Any]:
    if path.parent.is_symlink():
        raise OSError(errno.ELOOP, "its folder is a link")
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    with _opened(path) as file:
        if start + size > os.fstat(file.fileno()).st_size:
            raise EOFError("it is too short")
        file.seek(start)
        raw = file.read(size)
    if row.dtype.startswith("key<"):
        words = np.frombuffer(raw, np.uint32)
        return words.reshape(*row.shape, words.size // max(1, math.prod(row.shape)))
    dtype: np.dtype[Any] = jnp.dtype(row.dtype)
    return np.frombuffer(raw, dtype).reshape(row.shape)


def _opened(path: Path) -> BinaryIO:
    """Opens a regular file: a pipe without a writer would be waited for."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # `open` refuses folders
        raise OSError(errno.EINVAL, "it is no regular file")
    return open(path, "rb")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
