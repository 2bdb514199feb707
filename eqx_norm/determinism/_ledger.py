"""`Ledger` writes the rows of a run to a file, step by step; `read` reads it.

The file has lines of JSON: a header that says what wrote it, then a `Row` each. Values that
were kept are in a folder beside it, one file a step: `a.jsonl.values/37.npz`.
"""

import json
import operator
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ._fingerprint import hexadecimal
from ._probe import Record

_FORMAT = "eqx_norm.determinism ledger, version 3"
# What the header tells of the run besides.
RAN_BY = ("jax", "platform", "device")


class Row(NamedTuple):
    """Says what one probe saw in one step. `fingerprint` is `None` where it was not passed."""

    step: int
    probe: str
    kind: str
    iteration: tuple[int, ...]
    again: int  # 1 where the name occurs for the first time, 2 for the second
    fingerprint: str | None
    shape: tuple[int, ...]
    dtype: str
    values: str | None  # what they are called in the step's file

    @property
    def label(self) -> str:
        loops = f", iteration {'.'.join(map(str, self.iteration))}" if self.iteration else ""
        again = f", time {self.again}" if self.again > 1 else ""
        return f"`{self.probe}` {self.kind}{loops}{again}"

    @property
    def place(self) -> str:
        return f"step {self.step}: {self.label}"


class LedgerError(ValueError):
    """Says why a file is no ledger, is damaged, or is of another program."""


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.values")


class Ledger:
    """Writes a file of rows, one for each probe and step, to compare with another run's.

    ```python
    with Ledger("a.jsonl") as ledger:
        ...
        ledger.append(i, record)
    ```

    A run that is killed leaves all steps that it has appended, and perhaps a part of the next,
    whose incomplete last line readers leave out. Values that were kept are in the folder
    `a.jsonl.values/`: rename and delete the two together.

    **Arguments:**

    - `path`: of the file to make.

    **Raises:** `FileExistsError` where there is such a file or folder: none is written over.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if taken := [p for p in (self.path, _beside(self.path)) if p.exists()]:
            raise FileExistsError(
                f"Ledger({str(path)!r}): there is {taken[0]}, and neither a ledger nor values "
                "beside it are written over. Give another name, or delete both."
            )
        device = jax.devices()[0]
        self._file = open(self.path, "x", encoding="ascii")  # noqa: SIM115 (`close` closes it)
        self._steps: set[int] = set()
        ran_by = jax.__version__, device.platform, device.device_kind
        self._write([{"format": _FORMAT, **dict(zip(RAN_BY, ran_by, strict=True))}])

    def append(self, step: SupportsIndex, record: Record) -> None:
        """Writes the rows of one step, and leaves them to the system.

        **Arguments:**

        - `step`: its number, one that this ledger does not have yet.
        - `record`: what `recorded` gave.

        **Raises:** `ValueError` for a step that is there already, for a record of several
        steps or members, and for a ledger that has been closed.
        """
        step, prints = operator.index(step), np.asarray(record.fingerprints)
        if prints.ndim != 2:
            raise ValueError(
                f"ledger.append({step}, record): the rows of this record have the shape "
                f"{prints.shape}, those of a step (rows, 2). Take one out of a vmap or scan by "
                "jax.tree.map(lambda a: a[i], record)."
            )
        if step in self._steps:
            raise ValueError(
                f"{self.path} has a step {step} already. Count the steps through, or give each "
                "run a ledger of its own."
            )
        rows, kept, seen = [], {}, Counter()
        for i, probe in enumerate(record.plan):
            seen[key := (probe.name, probe.kind, probe.iteration)] += 1
            # Sums of 0 are those of a branch that was not taken, or of no values.
            bits = hexadecimal(prints[i]) if prints[i].any() or 0 in probe.shape else None
            values = str(i) if record.values and bits else None
            if values:
                kept[values] = np.asarray(record.values[i])
            row = Row(step, *key, seen[key], bits, probe.shape, probe.dtype, values)
            rows.append(row._asdict())
        if kept:
            _beside(self.path).mkdir(exist_ok=True)
            np.savez(_beside(self.path) / f"{step}.npz", **kept)
        self._write(rows)
        self._steps.add(step)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _write(self, lines: list[dict[str, Any]]) -> None:
        texts = [json.dumps(line, separators=(",", ":")) + "\n" for line in lines]
        self._file.write("".join(texts))
        self._file.flush()


class Contents(NamedTuple):
    """Holds what is in a ledger: its rows, in the order in which they were appended."""

    path: Path
    header: dict[str, Any]
    rows: tuple[Row, ...]
    is_truncated: bool  # its last line is incomplete: the run was killed

    def values(self, row: Row) -> NDArray[Any] | None:
        """Returns the values that were kept for a row, or `None`; for keys, their data.

        **Raises:** `LedgerError` where they cannot be read.
        """
        if row.values is None:
            return None
        path = _beside(self.path) / f"{row.step}.npz"
        try:
            with np.load(path) as file:
                values = file[row.values]
            # NumPy knows the bytes of small floats such as bfloat16, and not their dtype.
            return values.view(jnp.dtype(row.dtype)) if values.dtype.kind == "V" else values
        except Exception as error:  # of NumPy, of ZIP, or of the system
            why = f"{path}, which cannot be read ({error})"
            raise LedgerError(f"{self.path} has values kept in {why}.") from None


def read(path: str | os.PathLike[str]) -> Contents:
    """Returns what is in a ledger, but for an incomplete last line, as a killed run leaves it.

    **Raises:** `LedgerError` for a file that cannot be read, is no ledger, is of another
    version, or is damaged, saying in which line.
    """
    path, rows, number = Path(path), [], 1
    try:
        *lines, rest = path.read_bytes().split(b"\n")
        header = json.loads(lines[0] if lines else rest)
        if not lines or header["format"] != _FORMAT or not all(header[of] for of in RAN_BY):
            raise ValueError
        for line in lines[1:]:
            number += 1
            fields = json.loads(line)
            tuples = {name: tuple(fields[name]) for name in ("iteration", "shape")}
            rows.append(Row(**{**fields, **tuples}))
    except OSError as error:
        raise LedgerError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, LookupError, TypeError):
        raise LedgerError(
            f"{path} is no ledger, or a damaged one: line {number} is not what an {_FORMAT}, "
            "has there. (Only the last line may be incomplete.)"
        ) from None
    return Contents(path, header, tuple(rows), bool(rest))
