"""`compare`: the first place where two runs part."""

import os
from typing import NamedTuple

from ._difference import difference
from ._read import Contents, LedgerError, Row, printable, read


class Verdict(NamedTuple):
    """What `compare` has found. As text, `str(verdict)`, it is for people.

    `step` and `probe`, `kind` say what is the first to differ, in the order of the program;
    they are `None` where all is the same, and where one run has ended before the other, or was
    killed while it wrote.
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
    """Compares the ledgers of two runs of one program.

    Rows are matched by step and name, and compared in the order of the program: step by step,
    forward before backward. Where values were kept, the verdict says how many elements differ,
    and by how much.

    **Arguments:**

    - `a`, `b`: the files.

    **Returns:** a `Verdict`. An incomplete ledger is compared as far as it goes, and is never
    the same as another: what came next is not known.

    **Raises:** `LedgerError` for a file that is no ledger or is damaged, where the two are not
    of the same program (other probes, or other steps), and where neither has any rows.
    """
    first, second = read(a), read(b)
    if not first.rows and not second.rows:
        raise LedgerError(
            f"{first.path} and {second.path} have no rows: nothing was recorded, so that there "
            "is nothing to compare. Rows come from monitor(value, name) or "
            "monitor_module(model) inside of the function that recorded(...) goes around, and "
            "are written by ledger.append(step, record)."
        )
    notes = _notes(first, second)
    for i, (row, other) in enumerate(zip(first.rows, second.rows, strict=False)):
        if row.key != other.key:
            raise LedgerError(
                f"{first.path} and {second.path} are not of the same program: where the one "
                f"has {_at(row)}, the other has {_at(other)}. Compare runs with the same "
                "probes and the same steps."
            )
        what = (row.fingerprint, row.shape, row.dtype)
        if what != (other.fingerprint, other.shape, other.dtype):
            lines = [_at(row), *_details(first, row, second, other), _before(first, i), *notes]
            text = "\n  ".join(lines)
            return Verdict(False, i, text, row.step, row.probe, row.kind)
    agreed = min(len(first.rows), len(second.rows))
    if len(first.rows) != len(second.rows):
        shorter = min(first, second, key=lambda contents: len(contents.rows))
        longer = second if shorter is first else first
        text = (
            f"{shorter.path} ends before {_at(longer.rows[agreed])}, with which "
            f"{longer.path} goes on"
        )
        return Verdict(False, agreed, "\n  ".join([text, _before(first, agreed), *notes]))
    steps = len({row.step for row in first.rows})
    agree = f"{agreed} rows of {steps} steps agree, to the bit"
    if first.is_truncated or second.is_truncated:
        text = f"not known to be the same: {agree}, and what came next is not known"
        return Verdict(False, agreed, "\n  ".join([text, *notes]))
    return Verdict(True, agreed, "\n  ".join([f"the same: {agree}", *notes]))


def _at(row: Row) -> str:
    return f"step {row.step}: {row.label}"


def _before(contents: Contents, agreed: int) -> str:
    if not agreed:
        return "nothing comes before it"
    last = contents.rows[agreed - 1]
    return f"before it, {agreed} rows agree; the last is step {last.step}: {last.label}"


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
    return [*lines, *difference(values, others).split("; ")]


def _notes(first: Contents, second: Contents) -> list[str]:
    notes = [
        f"{contents.path} is incomplete: the run was killed while it wrote its last line, or "
        "is writing it; the line is left out"
        for contents in (first, second)
        if contents.is_truncated
    ]
    for what in ("jax", "platform", "device"):
        if first.header[what] != second.header[what]:
            pair = (printable(contents.header[what]) for contents in (first, second))
            notes.append(f"they were written with different {what}: {' and '.join(pair)}")
    return notes
