"""`compare` names the first row in which two ledgers differ, and says by how much."""

import os
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ._ledger import RAN_BY, Contents, LedgerError, Row, printable, read


class Verdict(NamedTuple):
    """Holds what `compare` has found; `str(verdict)` is for people.

    `step`, `probe` and `kind` say what differs first, in the order of the program. They are
    `None` where nothing differs, and where one run ends before the other, or was killed.
    """

    same: bool
    agreed: int  # rows before the first that differs
    text: str
    step: int | None = None
    probe: str | None = None
    kind: str | None = None

    def __str__(self) -> str:
        return self.text


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Verdict:
    """Returns the first row in which the ledgers of two runs of one program differ.

    Rows are matched by step and name, and compared in the order of the program: step by step,
    forward before backward. Where values were kept, the verdict says how many elements differ,
    and by how much.

    **Arguments:**

    - `a`, `b`: the files.

    **Returns:** a `Verdict`. An incomplete ledger is compared as far as it goes, and is never
    the same as another, as what came next is not known.

    **Raises:** `LedgerError` for a file that is no ledger or is damaged, for two that are not
    of the same program (other probes or steps), and where neither has any rows.
    """
    first, second = read(a), read(b)
    if not first.rows and not second.rows:
        raise LedgerError(
            f"{first.path} and {second.path} have no rows: nothing was recorded, so that there "
            "is nothing to compare. Rows come from monitor(value, name) or "
            "monitor_module(model) inside of the function that recorded(...) goes around, and "
            "are written by ledger.append(step, record)."
        )

    def verdict(same: bool, agreed: int, *lines: str, at: tuple[Any, ...] = ()) -> Verdict:
        return Verdict(same, agreed, "\n  ".join([*lines, *_notes(first, second)]), *at)

    for i, (row, other) in enumerate(zip(first.rows, second.rows, strict=False)):
        if row[:5] != other[:5]:  # step, probe, kind, iteration, again
            raise LedgerError(
                f"{first.path} and {second.path} are not of the same program: where the one "
                f"has {row.place}, the other has {other.place}. Compare runs with the same "
                "probes and the same steps."
            )
        if row[:-1] != other[:-1]:  # all but where the values are
            details = _details(first, row, second, other)
            at = (row.step, row.probe, row.kind)
            return verdict(False, i, row.place, *details, _before(first, i), at=at)
    agreed = min(len(first.rows), len(second.rows))
    if len(first.rows) != len(second.rows):
        shorter, longer = sorted((first, second), key=lambda contents: len(contents.rows))
        ends = f"{shorter.path} ends before {longer.rows[agreed].place}"
        goes_on = f"{ends}, with which {longer.path} goes on"
        return verdict(False, agreed, goes_on, _before(first, agreed))
    steps = len({row.step for row in first.rows})
    agree = f"{agreed} rows of {steps} steps agree, to the bit"
    if first.is_truncated or second.is_truncated:
        text = f"not known to be the same: {agree}, and what came next is not known"
        return verdict(False, agreed, text)
    return verdict(True, agreed, f"the same: {agree}")


def _before(contents: Contents, agreed: int) -> str:
    if not agreed:
        return "nothing comes before it"
    return f"before it, {agreed} rows agree; the last is {contents.rows[agreed - 1].place}"


def _details(first: Contents, row: Row, second: Contents, other: Row) -> list[str]:
    for what in ("shape", "dtype"):
        if getattr(row, what) != getattr(other, what):
            pair = (printable(str(getattr(r, what))) for r in (row, other))
            return [f"{what}: {' and '.join(pair)}"]
    if row.fingerprint is None or other.fingerprint is None:
        taken = first if other.fingerprint is None else second
        return [f"only {taken.path} has passed it: the other took another branch"]
    lines = [f"fingerprints {row.fingerprint} and {other.fingerprint}"]
    try:
        values, others = first.values(row), second.values(other)
    except LedgerError as error:  # which does not change where they part
        return [*lines, str(error)]
    if values is None or others is None:
        return [*lines, "values were not kept: recorded(step, keep_values=True) keeps them"]
    return [*lines, *difference(values, others)]


def _notes(first: Contents, second: Contents) -> list[str]:
    notes = [
        f"{contents.path} is incomplete: the run was killed while it wrote its last line, or "
        "is writing it; the line is left out"
        for contents in (first, second)
        if contents.is_truncated
    ]
    for what in RAN_BY:
        if first.header[what] != second.header[what]:
            pair = (printable(contents.header[what]) for contents in (first, second))
            notes.append(f"they were written with different {what}: {' and '.join(pair)}")
    return notes


def difference(a: Any, b: Any) -> list[str]:
    """Returns in words in how many elements two arrays of one dtype differ, where first, and
    the largest difference, for floats also in ulps."""
    if a.shape != b.shape:
        return [f"shapes {a.shape} and {b.shape}"]
    raw = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b)]
    differs = (raw[0] != raw[1]).reshape(*a.shape, a.dtype.itemsize).any(axis=-1)
    first = tuple(map(int, np.argwhere(differs)[0]))
    lines = [
        f"{differs.sum()} of {a.size} elements differ",
        f"the first is [{', '.join(map(str, first))}]: {a[first]!s} and {b[first]!s}",
    ]
    x, y = a[differs], b[differs]
    if np.iscomplexobj(x):
        x, y = (np.stack([z.real, z.imag]) for z in (x, y))
    if jnp.issubdtype(x.dtype, jnp.floating):
        finite = np.isfinite(x.astype(np.float64)) & np.isfinite(y.astype(np.float64))
        if not finite.all():
            lines.append(f"{int((~finite).sum())} of them are not finite in one or both")
        x, y = x[finite], y[finite]
        if x.size:
            with np.errstate(over="ignore"):  # inf, for those at both ends of float64
                apart = np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
            lines.append(f"max difference {apart:.6g}, {_ulps(x, y)} ulp")
    elif x.dtype != bool:
        apart = max(abs(int(p) - int(q)) for p, q in zip(x.flat, y.flat, strict=True))
        lines.append(f"max difference {apart}")
    return lines


def _ulps(x: NDArray[Any], y: NDArray[Any]) -> int:
    """Returns the largest difference, in steps from a number of the dtype to the next."""
    magnitude = 2 ** (jnp.finfo(x.dtype).bits - 1) - 1
    steps = []  # from 0, as int64
    for v in (x, y):
        bits = np.ascontiguousarray(v).view(f"i{v.itemsize}").astype(np.int64) & magnitude
        steps.append(np.where(v < 0, -bits, bits))
    # As uint64, which holds the difference of any two.
    return int((np.maximum(*steps) - np.minimum(*steps)).view(np.uint64).max())
