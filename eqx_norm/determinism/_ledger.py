"""`Ledger`: the rows of a run, in a file that survives the run's death."""

import contextlib
import json
import operator
import os
import threading
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

import jax
import numpy as np
from numpy.typing import NDArray

from ._fingerprint import hexadecimal
from ._plan import Place, Plan, places
from ._record import Record

FORMAT = "eqx_norm.determinism ledger"
VERSION = 2
# The end of each line: of all that is before it.
CHECKSUM = b',"crc":"%08x"}\n'
# Bytes of a line at most, of which its probe's name is all but some hundred.
LONGEST_LINE = 2**16

# A row, and its fingerprint if the program has passed it.
_Passed = tuple[Place, NDArray[np.uint32] | None]


class Ledger:
    """A file of rows, one for each probe and step, to compare with that of another run.

    ```python
    with Ledger("a.jsonl") as ledger:
        ...
        ledger.append(i, record)
    ```

    The file is only ever appended to. Each line is JSON, with a checksum; the first says by
    what it was written. A step's rows are written together, and `append` returns once the
    system says that they are on the disk (`fsync`): a run that is killed, even by the loss of
    power, leaves all steps that it has appended, and perhaps a part of the next, whose last
    line, if it is incomplete, readers leave out. Where `append` fails, on a full disk, say,
    what it has written of the step is taken back, and it may be called again.

    Values that were kept are beside it, in the folder `a.jsonl.values/`, one file a step, which
    is on the disk before the rows that need it. The folder belongs to the ledger: who renames
    or deletes the one does so with the other.

    **Arguments:**

    - `path`: of the file to make. One that is there is never written over, nor are values
        that were kept for one of that name.

    **Raises:** `FileExistsError` for such a file or folder.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._values = folder_of_values(self.path.absolute())
        for taken in (self.path, self._values):
            if os.path.lexists(taken):
                raise FileExistsError(
                    f"Ledger({str(path)!r}): there is {taken}, and neither a ledger nor the "
                    "values kept beside it are written over. Give another name, or delete both "
                    "if the run is not needed any more."
                )
        devices = jax.devices()
        header = {
            "format": FORMAT,
            "version": VERSION,
            "jax": jax.__version__,
            "platform": devices[0].platform,
            "device": devices[0].device_kind,
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
        """`append` for the parts of a record, on the host."""
        with self._lock:
            if self._file.closed:
                raise ValueError(f"{self.path} has been closed: step {step} comes too late.")
            if step in self._steps:
                raise ValueError(
                    f"{self.path} has a step {step} already. Count the steps through, or give "
                    "each run a ledger of its own."
                )
            rows = [
                # Sums of 0 are those of a branch that was not taken, or of no values.
                (place, pair if pair.any() or 0 in place.probe.shape else None)
                for place, pair in zip(places(plan), fingerprints, strict=True)
            ]
            kept = self._keep(step, rows, values) if values else [None] * len(rows)
            lines = [
                _row(step, place, pair, where)
                for (place, pair), where in zip(rows, kept, strict=True)
            ]
            self._write(b"".join(map(_encoded, lines)))
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

    def _keep(
        self, step: int, rows: list[_Passed], values: tuple[NDArray[Any], ...]
    ) -> list[list[int] | None]:
        """Writes the values to a file of the step's, which is on the disk before the rows, and
        returns where in it those of each row begin, and how many bytes they are."""
        if not self._has_values:
            self._values.mkdir()
            self._has_values = True
            _sync(self._values.parent)
        path = self._values / str(step)
        unfinished = path.with_suffix(".unfinished")
        kept = []
        try:
            with open(unfinished, "wb") as file:
                for place, pair in rows:
                    if pair is None:
                        kept.append(None)
                        continue
                    # NumPy's formats do not know JAX's small floats: bytes.
                    x = values[place.number][place.iteration]
                    kept.append([file.tell(), x.nbytes])
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


def folder_of_values(path: Path) -> Path:
    """Returns the folder with the values that were kept for a ledger."""
    return Path(f"{path}.values")


def _sync(folder: Path) -> None:
    """A new file is on the disk only once its name is, in the folder."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _row(
    step: int, place: Place, pair: NDArray[np.uint32] | None, kept: list[int] | None
) -> dict[str, Any]:
    probe = place.probe
    return {
        "step": step,
        "probe": probe.name,
        "kind": probe.kind,
        "iteration": place.iteration,
        "again": place.again,
        "fingerprint": None if pair is None else hexadecimal(pair),
        "shape": probe.shape,
        "dtype": probe.dtype,
        "values": kept,
    }


def _encoded(line: dict[str, Any]) -> bytes:
    text = json.dumps(line, separators=(",", ":")).encode()[:-1]
    text += CHECKSUM % zlib.crc32(text)
    if len(text) > LONGEST_LINE:
        raise ValueError(
            f"A row of {len(text)} bytes cannot be read again: {LONGEST_LINE} is the most. "
            f"Give the probe {line['probe'][:40]!r}... a shorter name."
        )
    return text
