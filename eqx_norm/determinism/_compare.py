"""Defines `compare`, which names the first row in which two ledgers differ."""

import os
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64, Shaped, UInt8

from ._ledger import Contents, LedgerError, Row, read


class Verdict(NamedTuple):
    """Holds the result of `compare`; prints as text.

    **Fields:**

    - `same`: whether both ledgers are complete and all their rows agree to the bit.
    - `agreed`: the number of rows before the first that differs.
    - `text`: the result in words.
    - `step`, `probe`, `kind`: the first row that differs, or `None` (also if one run ends).
    """

    same: bool
    agreed: int
    text: str
    step: int | None = None
    probe: str | None = None
    kind: str | None = None

    def __str__(self) -> str:
        return self.text


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Verdict:
    """Compares the ledgers of two runs of one program, and returns their first difference.

    **Arguments:**

    - `a`, `b`: the paths of the ledgers.

    **Returns:** a `Verdict`, which says by how much the values differ if both ledgers kept the
    values. Rows of an incomplete ledger are compared, but the verdict is never `same`.

    **Raises:** `LedgerError` for a file that is not a ledger, for ledgers of different programs
    (other probes or steps), and if neither ledger has rows.
    """
    first, second = read(a), read(b)
    if not first.rows and not second.rows:
        raise LedgerError(
            f"{first.path} and {second.path} have no rows: nothing was recorded. Call "
            "monitor(value, name) or monitor_module(model) inside the function that you pass "
            "to recorded, and ledger.append(step, record) after each step."
        )
    agreed = 0
    for row, other in zip(first.rows, second.rows, strict=False):
        if row != other:
            break
        agreed += 1
    if agreed == len(first.rows) == len(second.rows):
        return _agreement(first, second)
    return _difference_after(agreed, first, second)


def _agreement(first: Contents, second: Contents) -> Verdict:
    is_truncated = first.is_truncated or second.is_truncated
    agreed = len(first.rows)
    steps = len({row.step for row in first.rows})
    text = f"the same: {agreed} rows of {steps} steps agree, to the bit"
    if is_truncated:
        text = f"not known to be {text}, and what came next is not known"
    lines = [text, *_notes(first, second)]
    return Verdict(not is_truncated, agreed, "\n  ".join(lines))


def _difference_after(agreed: int, first: Contents, second: Contents) -> Verdict:
    before = "nothing comes before it"
    if agreed:
        before = f"before it, {agreed} rows agree; the last is {first.rows[agreed - 1].place}"
    notes = [before, *_notes(first, second)]
    for shorter, longer in ((first, second), (second, first)):
        if agreed == len(shorter.rows):
            place = longer.rows[agreed].place
            end = f"{shorter.path} ends before {place}, where {longer.path} continues"
            return Verdict(False, agreed, "\n  ".join([end, *notes]))
    row, other = first.rows[agreed], second.rows[agreed]
    if row.place != other.place:
        raise LedgerError(
            f"{first.path} and {second.path} are from different programs: the first has "
            f"{row.place}, the other has {other.place}. Compare runs with the same probes and "
            "the same steps."
        )
    lines = [row.place, *_details(first, row, second, other), *notes]
    return Verdict(False, agreed, "\n  ".join(lines), row.step, row.probe, row.kind)


def _details(first: Contents, row: Row, second: Contents, other: Row) -> list[str]:
    if (row.shape, row.dtype) != (other.shape, other.dtype):
        return [f"shape and dtype: {row.shape} {row.dtype} and {other.shape} {other.dtype}"]
    if row.fingerprint is None or other.fingerprint is None:
        passed = first if other.fingerprint is None else second
        return [f"only {passed.path} passed it: the other took another branch"]
    values, others = first.values(row), second.values(other)
    lines = [f"fingerprints {row.fingerprint} and {other.fingerprint}"]
    if values is None or others is None:
        return [*lines, "values were not kept: recorded(step, keep_values=True) keeps them"]
    is_of_one_type = (values.shape, values.dtype) == (others.shape, others.dtype)
    if not is_of_one_type or values.tobytes() == others.tobytes():
        raise LedgerError(
            f"{first.path} and {second.path} differ in {row.place}, but the values kept beside "
            "them are equal, or have two shapes or dtypes: one folder is of another ledger. "
            "Delete both folders to compare fingerprints alone."
        )
    return [*lines, *difference(values, others)]


def _notes(first: Contents, second: Contents) -> list[str]:
    notes = list[str]()
    for ledger in (first, second):
        if ledger.is_truncated:
            notes.append(f"{ledger.path} is incomplete: its run was killed, or is writing")
    for name, value in first.header.items():
        other = second.header.get(name)
        if value != other:
            notes.append(f"they ran with different {name}: {value} and {other}")
    return notes


def difference(a: Shaped[np.ndarray, "*shape"], b: Shaped[np.ndarray, "*shape"]) -> list[str]:
    """Describes the difference of two arrays of one shape and dtype: the number of elements
    that differ, the first of them, and the largest difference, for floats also in ulps."""
    differs = (_bytes(a) != _bytes(b)).any(axis=-1)
    first = tuple(map(int, np.argwhere(differs)[0]))
    real = np.real(a).dtype
    x, y = a[differs].view(real), b[differs].view(real)  # both parts of complex numbers
    with np.errstate(all="ignore"):  # the difference may be infinite or NaN
        apart = np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
    ulps = f", {_ulps(x, y)} ulp" if jnp.issubdtype(x.dtype, jnp.floating) else ""
    return [
        f"{differs.sum()} of {a.size} elements differ",
        f"the first is [{', '.join(map(str, first))}]: {a[first]!s} and {b[first]!s}",
        f"max difference {apart:.6g}{ulps}",
    ]


def _bytes(x: Shaped[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape bytes"]:
    """Returns the bytes of each element along one more axis."""
    flat = np.ascontiguousarray(x).reshape(-1)
    return flat.view(np.uint8).reshape(*x.shape, x.dtype.itemsize)


def _ulps(x: Shaped[np.ndarray, " elements"], y: Shaped[np.ndarray, " elements"]) -> int:
    """Returns the largest difference, in steps between neighbouring numbers of the dtype."""
    first, second = _steps_from_zero(x), _steps_from_zero(y)
    # A uint64 holds the difference of any two numbers of steps.
    distances = np.maximum(first, second) - np.minimum(first, second)
    return int(distances.view(np.uint64).max())


def _steps_from_zero(x: Shaped[np.ndarray, " elements"]) -> Int64[np.ndarray, " elements"]:
    """Returns how many numbers of the dtype lie between 0 and each float, with its sign."""
    magnitude = 2 ** (jnp.finfo(x.dtype).bits - 1) - 1
    bits = x.view(f"i{x.itemsize}").astype(np.int64)
    return np.where(bits < 0, -(bits & magnitude), bits)
