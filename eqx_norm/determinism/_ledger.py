"""Defines `Ledger`, which writes the rows of a run to a file step by step, and `read`.

Each line of the file is JSON: first a header with JAX's version and the device, then one `Row`
a line. Kept values are in a folder beside the file, by step: `a.jsonl.values/37.npz`.
"""

import contextlib
import json
import operator
import os
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt32

from ._fingerprint import hexadecimal
from ._program import Probe, Record

_FORMAT = "eqx_norm.determinism ledger, version 4"


class Row(NamedTuple):
    """Describes a value that a probe recorded in one step."""

    step: int
    probe: str
    kind: str
    iteration: tuple[int, ...]
    again: int  # 1 if the name occurs for the first time in the step, 2 for the second
    fingerprint: str | None  # `None` in a branch that was not taken
    shape: tuple[int, ...]
    dtype: str

    @property
    def place(self) -> str:
        """Returns the row's place in words, which no other row of a ledger has."""
        loops = f", iteration {'.'.join(map(str, self.iteration))}" if self.iteration else ""
        again = f", time {self.again}" if self.again > 1 else ""
        return f"step {self.step}: `{self.probe}` {self.kind}{loops}{again}"


class LedgerError(ValueError):
    """Reports that a file is not a ledger, or that two ledgers cannot be compared."""


def checked_path(call: str, path: object) -> Path:
    """Returns the path of a ledger; raises `TypeError` for another object."""
    if not isinstance(path, str | os.PathLike):
        is_ledger = isinstance(path, Ledger | Contents)
        fix = "Give its .path" if is_ledger else "Give text or a pathlib.Path, as 'a.jsonl'"
        raise TypeError(f"{call}: a {type(path).__name__} is no path of a file. {fix}.")
    return Path(path)


def _folder(path: Path) -> Path:
    """Returns the folder of the values that a ledger has kept."""
    return path.with_name(f"{path.name}.values")


class Ledger(contextlib.AbstractContextManager["Ledger"]):
    """Writes one row for each probe and step to a file, to compare with another run.

    ```python
    with Ledger("a.jsonl") as ledger:
        ...
        ledger.append(i, record)
    ```

    A killed run leaves all steps that it has appended, and perhaps an incomplete last line,
    which readers ignore. Kept values are in the folder `a.jsonl.values/`: rename and delete the
    file and the folder together.

    **Arguments:**

    - `path`: the file to create.

    **Raises:** `FileExistsError` if the file or its folder of values exists; `TypeError` for a
    `path` that is none.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = checked_path("Ledger(path)", path)
        for file in (self.path, _folder(self.path)):
            if file.exists():
                raise FileExistsError(
                    f"Ledger({str(path)!r}): {file} exists. Choose another name, or delete "
                    "the file and its folder of values."
                )
        device = jax.devices()[0]
        self._file = open(self.path, "x", encoding="ascii")  # noqa: SIM115 (`close` closes it)
        self._steps: set[int] = set()
        ran_by = {"platform": device.platform, "device": device.device_kind}
        self._write([{"format": _FORMAT, "jax": jax.__version__, **ran_by}])

    def append(self, step: SupportsIndex, record: Record) -> None:
        """Writes the rows of one step, and flushes them to the operating system.

        **Arguments:**

        - `step`: a number that this ledger does not have yet.
        - `record`: the `Record` of the step, from `recorded`.

        **Raises:** `ValueError` for a step that the ledger has already, and for a record of
        several steps or members; `TypeError` for other objects.
        """
        is_number = isinstance(step, SupportsIndex) and not getattr(step, "ndim", 0)
        if not (is_number and isinstance(record, Record)):
            given = f"{type(step).__name__}, {type(record).__name__}"
            raise TypeError(
                f"ledger.append({given}): give the number of the step, an int, and its Record: "
                "output, record = step(...)."
            )
        step = operator.index(step)
        prints = np.asarray(record.fingerprints)
        if prints.ndim != 2:
            raise ValueError(
                f"ledger.append({step}, record): the record is of several steps or members. "
                "Take one out of a vmap or scan by jax.tree.map(lambda a: a[i], record)."
            )
        if step in self._steps:
            raise ValueError(
                f"{self.path} has a step {step} already: number steps consecutively."
            )
        rows = _rows(step, record.plan, prints)
        if record.values:
            values: dict[str, Any] = {}  # `np.savez` has another keyword argument, too
            for row, value in zip(rows, record.values, strict=True):
                values[row.place] = value
            _folder(self.path).mkdir(exist_ok=True)
            np.savez(_folder(self.path) / f"{step}.npz", **values)
        self._write([row._asdict() for row in rows])
        self._steps.add(step)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, lines: Sequence[Mapping[str, object]]) -> None:
        texts = [json.dumps(line, separators=(",", ":")) + "\n" for line in lines]
        self._file.write("".join(texts))
        self._file.flush()


def _rows(step: int, plan: Sequence[Probe], prints: UInt32[np.ndarray, "rows 2"]) -> list[Row]:
    rows = list[Row]()
    times = Counter[tuple[str, str, tuple[int, ...]]]()
    for probe, pair in zip(plan, prints, strict=True):
        key = (probe.name, probe.kind, probe.iteration)
        times[key] += 1
        # Both sums are 0 in a branch that was not taken, and for an empty array.
        was_taken = pair.any() or 0 in probe.shape
        bits = hexadecimal(pair) if was_taken else None
        rows.append(Row(step, *key, times[key], bits, probe.shape, probe.dtype))
    return rows


# What NumPy and `zipfile` raise for a file that is damaged, or that is none of theirs.
_DAMAGED = (
    OSError,
    EOFError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
)


class Contents(NamedTuple):
    """Holds the contents of a ledger, as `read` returns them."""

    path: Path
    header: dict[str, str]
    rows: tuple[Row, ...]
    is_truncated: bool

    def values(self, row: Row) -> np.ndarray | None:
        """Returns the kept values of a row (for keys, their data), or `None` if the row has
        none or the folder is not beside the ledger. Raises `LedgerError` for a file without
        them."""
        path = _folder(self.path) / f"{row.step}.npz"
        if row.fingerprint is None or not path.exists():
            return None
        try:
            # NumPy leaves a file open that it cannot read.
            with open(path, "rb") as opened, np.load(opened) as file:
                values = file[row.place]
        except _DAMAGED:
            raise LedgerError(
                f"{path} is damaged, or of another ledger: the values of `{row.probe}` cannot "
                "be read. Delete the folder to compare fingerprints alone."
            ) from None
        # NumPy loads bfloat16 and other small floats as bytes without their dtype.
        return values.view(jnp.dtype(row.dtype)) if values.dtype.kind == "V" else values


def read(path: str | os.PathLike[str]) -> Contents:
    """Reads a ledger, except an incomplete last line.

    **Arguments:** `path`: the file.

    **Returns:** the `path`; `header`, which names JAX's version and the device; `rows`, in the
    order in which they were appended; `is_truncated`, whether the last line is incomplete; and
    a method `values(row)`.

    **Raises:** `LedgerError` for a file that cannot be read or is not a ledger of this version;
    `TypeError` for a `path` that is none.
    """
    path = checked_path("read(path)", path)
    try:
        *lines, incomplete = path.read_bytes().split(b"\n")
        header, *rows = map(json.loads, lines)
        if header["format"] != _FORMAT:
            raise ValueError
        for row in rows:
            row |= {name: tuple(row[name]) for name in ("iteration", "shape")}
        return Contents(path, header, tuple(Row(**row) for row in rows), bool(incomplete))
    except OSError as error:
        raise LedgerError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, LookupError, TypeError):
        raise LedgerError(f"{path} is not an {_FORMAT}, or is damaged.") from None
