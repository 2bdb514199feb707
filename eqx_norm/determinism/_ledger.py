"""Defines `Ledger`, which writes the rows of a run to a file step by step, and `read`.

Each line of the file is JSON: first a header that says what wrote it, then one `Row` a line.
Kept values are in a folder beside it, one file for each step: `a.jsonl.values/37.npz`.
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
# The other fields of the header.
RAN_BY = ("jax", "platform", "device")


class Row(NamedTuple):
    """Holds what one probe saw in one step."""

    step: int
    probe: str
    kind: str
    iteration: tuple[int, ...]
    again: int  # 1 if the name occurs for the first time in the step, 2 for the second
    fingerprint: str | None  # `None` in a branch that was not taken
    shape: tuple[int, ...]
    dtype: str
    values: str | None  # their name in the step's file

    @property
    def label(self) -> str:
        loops = f", iteration {'.'.join(map(str, self.iteration))}" if self.iteration else ""
        again = f", time {self.again}" if self.again > 1 else ""
        return f"`{self.probe}` {self.kind}{loops}{again}"

    @property
    def place(self) -> str:
        return f"step {self.step}: {self.label}"


class LedgerError(ValueError):
    """Says that a file is not a ledger, is damaged, or belongs to another program, and why."""


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.values")


class Ledger:
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

    **Raises:** `FileExistsError` if the file or its folder of values exists.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if taken := [p for p in (self.path, _beside(self.path)) if p.exists()]:
            raise FileExistsError(
                f"Ledger({str(path)!r}): {taken[0]} exists, and a ledger overwrites neither a "
                "file nor its folder of values. Choose another name, or delete both."
            )
        device = jax.devices()[0]
        self._file = open(self.path, "x", encoding="ascii")  # noqa: SIM115 (`close` closes it)
        self._steps: set[int] = set()
        ran_by = jax.__version__, device.platform, device.device_kind
        self._write([{"format": _FORMAT, **dict(zip(RAN_BY, ran_by, strict=True))}])

    def append(self, step: SupportsIndex, record: Record) -> None:
        """Writes the rows of one step, and flushes them to the operating system.

        **Arguments:**

        - `step`: a number that this ledger does not have yet.
        - `record`: the `Record` of the step, from `recorded`.

        **Raises:** `ValueError` for a step that the ledger has already, for a record of several
        steps or members, and for a closed ledger.
        """
        step, prints = operator.index(step), np.asarray(record.fingerprints)
        if prints.ndim != 2:
            raise ValueError(
                f"ledger.append({step}, record): fingerprints of the shape {prints.shape} are "
                "those of several steps or members; of one it is (rows, 2). Take one out of a "
                "vmap or scan by jax.tree.map(lambda a: a[i], record)."
            )
        if step in self._steps:
            raise ValueError(
                f"{self.path} has a step {step} already. Number the steps consecutively, and "
                "use one ledger for each run."
            )
        rows, kept, seen = [], {}, Counter()
        for i, probe in enumerate(record.plan):
            seen[key := (probe.name, probe.kind, probe.iteration)] += 1
            # Both sums are 0 in a branch that was not taken, and for an empty array.
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
    """Holds the contents of a ledger.

    **Fields:** `path`; `header`, which names JAX's version and the device; `rows`, in the order
    in which they were appended; `is_truncated`, whether the last line is incomplete.
    """

    path: Path
    header: dict[str, Any]
    rows: tuple[Row, ...]
    is_truncated: bool

    def values(self, row: Row) -> NDArray[Any] | None:
        """Returns the kept values of a row (for keys, their data), or `None` if it has none.

        **Raises:** `LedgerError` if they cannot be read.
        """
        if row.values is None:
            return None
        path = _beside(self.path) / f"{row.step}.npz"
        try:
            with np.load(path) as file:
                values = file[row.values]
            # NumPy loads bfloat16 and other small floats as bytes without their dtype.
            return values.view(jnp.dtype(row.dtype)) if values.dtype.kind == "V" else values
        except Exception as error:  # of NumPy, of ZIP, or of the system
            why = f"{path}, which cannot be read ({error})"
            raise LedgerError(f"{self.path} has kept values in {why}.") from None


def read(path: str | os.PathLike[str]) -> Contents:
    """Reads a ledger, without an incomplete last line.

    **Arguments:** `path`: the file.

    **Returns:** its `path`, `header`, `rows` and `is_truncated`, with a method `values(row)`.

    **Raises:** `LedgerError` for a file that cannot be read, is not a ledger, has another
    version, or is damaged; the message names the line.
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
            f"{path} is not a ledger, or is damaged: line {number} is not a line of an "
            f"{_FORMAT}. (Only the last line may be incomplete.)"
        ) from None
    return Contents(path, header, tuple(rows), bool(rest))
