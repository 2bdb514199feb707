"""`Ledger`: the rows of a run, in a file that survives the run's death."""

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
VERSION = 1
# The end of each line: of all that is before it.
CHECKSUM = b',"crc":"%08x"}\n'


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
    line, if it is incomplete, readers leave out. Values that were kept are beside it, in
    `a.jsonl.values/`, one file a step, which is on the disk before the rows that name it.

    **Arguments:**

    - `path`: of the file to make. One that is there is never written over.

    **Raises:** `FileExistsError` for a file that is there.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            self._file = open(self.path, "xb")  # noqa: SIM115 (it is closed by `close`)
        except FileExistsError:
            raise FileExistsError(
                f"Ledger({str(path)!r}): there is such a file, and a ledger is not written "
                "over. Give another name, or delete it if the run is not needed any more."
            ) from None
        self._steps: set[int] = set()
        # Callbacks come from threads of XLA's.
        self._lock = threading.Lock()
        devices = jax.devices()
        header = {
            "format": FORMAT,
            "version": VERSION,
            "jax": jax.__version__,
            "platform": devices[0].platform,
            "device": devices[0].device_kind,
        }
        self._write([header])
        _sync(self.path.parent)

    def append(self, step: SupportsIndex, record: Record) -> None:
        """Writes the rows of one step, and waits until the system has them on the disk.

        **Arguments:**

        - `step`: its number, one that this ledger does not have yet.
        - `record`: what `recorded` gave.

        **Raises:** `ValueError` for a step that is there already, for a record of several
        steps or members, and for a ledger that has been closed.
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
            self._steps.add(step)
            rows = places(plan)
            kept = self._keep(step, rows, values) if values else None
            pairs = zip(rows, fingerprints, strict=True)
            self._write(
                [
                    _row(step, place, pair, [kept, f"arr_{i}"] if kept else None)
                    for i, (place, pair) in enumerate(pairs)
                ]
            )

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

    def _write(self, lines: list[dict[str, Any]]) -> None:
        self._file.write(b"".join(map(_encoded, lines)))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _keep(
        self, step: int, rows: tuple[Place, ...], values: tuple[NDArray[Any], ...]
    ) -> str:
        """The file with the values, which is there before the rows that name it."""
        # NumPy's format does not know JAX's small floats: bytes, which the row explains.
        of_rows = [values[row.number][row.iteration].reshape(-1) for row in rows]
        folder = self.path.with_name(f"{self.path.name}.values")
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)
        path = folder / f"{step}.npz"
        unfinished = path.with_suffix(".unfinished")
        with open(unfinished, "wb") as file:
            np.savez(file, *[np.ascontiguousarray(v).view(np.uint8) for v in of_rows])
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync(folder)
        return path.relative_to(self.path.parent).as_posix()


def _sync(folder: Path) -> None:
    """A new file is on the disk only once its name is, in the folder."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _row(
    step: int, place: Place, pair: NDArray[np.uint32], kept: list[str] | None
) -> dict[str, Any]:
    probe = place.probe
    # Sums of 0 are those of a branch that was not taken, or of no values.
    was_passed = pair.any() or 0 in probe.shape
    return {
        "step": step,
        "probe": probe.name,
        "kind": probe.kind,
        "iteration": place.iteration,
        "again": place.again,
        "fingerprint": hexadecimal(pair) if was_passed else None,
        "shape": probe.shape,
        "dtype": probe.dtype,
        "values": kept,
    }


def _encoded(line: dict[str, Any]) -> bytes:
    text = json.dumps(line, separators=(",", ":")).encode()[:-1]
    return text + CHECKSUM % zlib.crc32(text)
