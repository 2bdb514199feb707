"""Defines `compare`, which names the first row in which two ledgers differ."""

import itertools
import os
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

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
    pairs = list(itertools.zip_longest(first.rows, second.rows))
    agreed = next((i for i, (row, other) in enumerate(pairs) if row != other), len(pairs))
    is_truncated = first.is_truncated or second.is_truncated
    if agreed == len(pairs):
        steps = len({row.step for row in first.rows})
        text = f"the same: {agreed} rows of {steps} steps agree, to the bit"
        if is_truncated:
            text = f"not known to be {text}, and what came next is not known"
        return Verdict(not is_truncated, agreed, "\n  ".join([text, *_notes(first, second)]))
    row, other = pairs[agreed]
    place: tuple[Any, ...] = ()
    if row is None:
        lines = [f"{first.path} ends before {other.place}, where {second.path} continues"]
    elif other is None:
        lines = [f"{second.path} ends before {row.place}, where {first.path} continues"]
    elif row.place != other.place:
        raise LedgerError(
            f"{first.path} and {second.path} are from different programs: the first has "
            f"{row.place}, the other has {other.place}. Compare runs with the same probes and "
            "the same steps."
        )
    else:
        place = row.step, row.probe, row.kind
        lines = [row.place, *_details(first, row, second, other)]
    last = f"{agreed} rows agree; the last is {first.rows[agreed - 1].place}" if agreed else ""
    lines += [f"before it, {last}" if agreed else "nothing comes before it"]
    return Verdict(False, agreed, "\n  ".join([*lines, *_notes(first, second)]), *place)


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
    return [*lines, *difference(values, others)]


def _notes(first: Contents, second: Contents) -> list[str]:
    truncated = [ledger.path for ledger in (first, second) if ledger.is_truncated]
    headers = ((k, a, second.header.get(k)) for k, a in first.header.items())
    return [
        *(f"{path} is incomplete: its run was killed, or is writing" for path in truncated),
        *(f"they ran with different {k}: {a} and {b}" for k, a, b in headers if a != b),
    ]


def difference(a: np.ndarray, b: np.ndarray) -> list[str]:
    """Describes the difference of two arrays of one shape and dtype: the number of elements
    that differ, the first of them, and the largest difference, for floats also in ulps."""
    raw = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b)]
    differs = (raw[0] != raw[1]).reshape(*a.shape, a.dtype.itemsize).any(axis=-1)
    first = tuple(map(int, np.argwhere(differs)[0]))
    real = np.real(a).dtype
    x, y = (v[differs].view(real) for v in (a, b))  # both parts of complex numbers
    with np.errstate(all="ignore"):  # the difference may be infinite or NaN
        apart = np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
    ulps = f", {_ulps(x, y)} ulp" if jnp.issubdtype(x.dtype, jnp.floating) else ""
    return [
        f"{differs.sum()} of {a.size} elements differ",
        f"the first is [{', '.join(map(str, first))}]: {a[first]!s} and {b[first]!s}",
        f"max difference {apart:.6g}{ulps}",
    ]


def _ulps(x: np.ndarray, y: np.ndarray) -> int:
    """Returns the largest difference, in steps between neighbouring numbers of the dtype."""
    magnitude = 2 ** (jnp.finfo(x.dtype).bits - 1) - 1
    bits = [v.view(f"i{v.itemsize}").astype(np.int64) for v in (x, y)]
    steps = [np.where(b < 0, -(b & magnitude), b) for b in bits]  # from 0
    # A uint64 holds the difference of any two numbers of steps.
    return int((np.maximum(*steps) - np.minimum(*steps)).view(np.uint64).max())
