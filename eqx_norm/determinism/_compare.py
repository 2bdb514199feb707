"""Defines `compare`, which names the first row in which two ledgers differ."""

import itertools
import os
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ._ledger import RAN_BY, Contents, LedgerError, Row, read


class Verdict(NamedTuple):
    """Holds the result of `compare`; prints as text.

    **Fields:**

    - `same`: whether both ledgers are complete and all their rows agree to the bit.
    - `agreed`: the number of rows before the first that differs.
    - `text`: the result in words.
    - `step`, `probe`, `kind`: the first row that differs, or `None` (where one run ends, too).
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

    **Returns:** a `Verdict`, which says by how much the values differ if both ledgers kept
    them. The rows of an incomplete ledger are compared, but it is never the same as another.

    **Raises:** `LedgerError` for a file that is not a ledger or is damaged, for ledgers of
    different programs (other probes or steps), and if neither ledger has rows.
    """
    first, second = read(a), read(b)
    if not first.rows and not second.rows:
        raise LedgerError(
            f"{first.path} and {second.path} have no rows: nothing was recorded. Call "
            "monitor(value, name) or monitor_module(model) inside the function that you pass "
            "to recorded, and ledger.append(step, record) after each step."
        )

    pairs = zip(first.rows, second.rows, strict=False)  # compared without the values' names
    agreed = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0][:-1] == pair[1][:-1], pairs)
    )
    row, other = (next(iter(of.rows[agreed:]), None) for of in (first, second))
    is_cut = first.is_truncated or second.is_truncated
    at: Any = ()
    if row and other:
        if row[:5] != other[:5]:  # step, probe, kind, iteration, again
            raise LedgerError(
                f"{first.path} and {second.path} are from different programs: the first has "
                f"{row.place}, the other has {other.place}. Compare runs with the same probes "
                "and the same steps."
            )
        at = row.step, row.probe, row.kind
        lines = [row.place, *_details(first, row, second, other)]
    elif next_row := row or other:
        shorter, longer = (second.path, first.path) if row else (first.path, second.path)
        lines = [f"{shorter} ends before {next_row.place}, where {longer} continues"]
    else:
        steps = len({row.step for row in first.rows})
        agree = f"the same: {agreed} rows of {steps} steps agree, to the bit"
        unknown = f"not known to be {agree}, and what came next is not known"
        lines = [unknown if is_cut else agree]
    if row or other:
        last = first.rows[agreed - 1].place if agreed else ""
        before = f"before it, {agreed} rows agree; the last is {last}"
        lines.append(before if agreed else "nothing comes before it")
    is_same = not (row or other or is_cut)
    return Verdict(is_same, agreed, "\n  ".join([*lines, *_notes(first, second)]), *at)


def _details(first: Contents, row: Row, second: Contents, other: Row) -> list[str]:
    if (row.shape, row.dtype) != (other.shape, other.dtype):
        return [f"shape and dtype: {row.shape} {row.dtype} and {other.shape} {other.dtype}"]
    if row.fingerprint is None or other.fingerprint is None:
        taken = first if other.fingerprint is None else second
        return [f"only {taken.path} passed it: the other took another branch"]
    lines = [f"fingerprints {row.fingerprint} and {other.fingerprint}"]
    try:
        values, others = first.values(row), second.values(other)
    except LedgerError as error:  # the first difference is known all the same
        return [*lines, str(error)]
    if values is None or others is None:
        return [*lines, "values were not kept: recorded(step, keep_values=True) keeps them"]
    return [*lines, *difference(values, others)]


def _notes(first: Contents, second: Contents) -> list[str]:
    killed = "the run was killed while it wrote its last line, or is writing it"
    cut = [f"{of.path} is incomplete: {killed}" for of in (first, second) if of.is_truncated]
    pairs = {what: (first.header[what], second.header[what]) for what in RAN_BY}
    differ = {what: f"{a} and {b}" for what, (a, b) in pairs.items() if a != b}
    return [*cut, *(f"they were written with different {k}: {v}" for k, v in differ.items())]


def difference(a: Any, b: Any) -> list[str]:
    """Says how many elements of two arrays of one dtype differ, which is the first, and how
    large the largest difference is, for floats also in ulps."""
    if a.shape != b.shape:
        return [f"the kept values have the shapes {a.shape} and {b.shape}"]
    raw = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b)]
    differs = (raw[0] != raw[1]).reshape(*a.shape, a.dtype.itemsize).any(axis=-1)
    if not differs.any():
        return ["the kept values do not differ: at least one file of values is of another run"]
    first = tuple(map(int, np.argwhere(differs)[0]))
    x, y = (v[differs].view(v.real.dtype) for v in (a, b))  # both parts of complex numbers
    with np.errstate(all="ignore"):  # it may be infinite, or not a number
        apart = np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
    ulps = f", {_ulps(x, y)} ulp" if jnp.issubdtype(x.dtype, jnp.floating) else ""
    return [
        f"{differs.sum()} of {a.size} elements differ",
        f"the first is [{', '.join(map(str, first))}]: {a[first]!s} and {b[first]!s}",
        f"max difference {apart:.6g}{ulps}",
    ]


def _ulps(x: NDArray[Any], y: NDArray[Any]) -> int:
    """Returns the largest difference, in steps between neighbouring numbers of the dtype."""
    magnitude = 2 ** (jnp.finfo(x.dtype).bits - 1) - 1
    bits = [v.view(f"i{v.itemsize}").astype(np.int64) for v in (x, y)]
    steps = [np.where(b < 0, -(b & magnitude), b) for b in bits]  # from 0
    # As uint64, which holds the difference of any two.
    return int((np.maximum(*steps) - np.minimum(*steps)).view(np.uint64).max())
