"""Says in a few lines what each layer does with its running statistics."""

from collections.abc import Callable, Iterable

import numpy as np

from experiments.lab.rows import by
from experiments.lab.tables import grid

from .row import FINITE, Row
from .script import SHAPE


def summary(rows: list[Row]) -> str:
    of_layers = by(rows, lambda row: row.layer)
    return grid("layer", of_layers, COLUMNS, lambda found, cell: cell(found))


def in_short(rows: list[Row]) -> str:
    return f"updates a call: {_updates(rows)}; memory after NaN: {_bad_batch(rows)}"


def raised(rows: list[Row]) -> str:
    """Returns what was raised, and by which batches; one line each."""
    found = by((row for row in rows if row.raised), lambda row: f"{row.layer}: {row.raised}")
    return "\n".join(
        f"raises: {what} ({', '.join(dict.fromkeys(row.values for row in mine))})"
        for what, mine in found.items()
    )


def _updates(rows: list[Row]) -> str:
    counts = [count for row in rows for count in (row.updates_1, row.updates_2)]
    return _joined(f"{count:.0f}" for count in counts if np.isfinite(count))


def _difference(rows: list[Row]) -> str:
    mine = [row for row in rows if (row.dtype, row.shape) == ("float32", SHAPE)]
    return _joined(f"{row.difference:.2f}" for row in mine)


def _variance(dtype: str) -> Callable[[list[Row]], str]:
    def cell(rows: list[Row]) -> str:
        several = [row for row in rows if row.dtype == dtype and row.n > 1]
        # Where a call is two updates, what one of them took in cannot be told.
        counted = [row for row in several if not row.raised and _updates([row]) == "1"]
        if not counted:
            return "fails" if several else "-"
        kind = "unbiased" if counted[0].unbiased else "biased"
        return f"{kind}, to {max(row.variance_error for row in counted):.0e}"

    return cell


def _one_value(rows: list[Row]) -> str:
    def said(row: Row) -> str:
        if row.raised:
            touched = "" if row.memory_0 == row.memory_1 else ", memory changed"
            return row.raised.partition(":")[0] + touched
        return "NaN" if row.nonfinite_training + row.nonfinite_evaluation else "finite"

    # Whether a layer can be run in bfloat16 is another column's.
    return _joined(said(row) for row in rows if row.n == 1 and row.dtype == "float32")


def _bad_batch(rows: list[Row]) -> str:
    def said(row: Row) -> str:
        if row.nonfinite_later:
            return "lost for ever"
        kept = "kept" if row.memory_1 == row.memory_2 else "changed"
        return kept + (", counted" if row.rejected == 1 else "")

    return _joined(said(row) for row in rows if row.batch != FINITE and not row.raised)


def _joined(said: Iterable[str]) -> str:
    return " or ".join(sorted(set(said))) or "-"


COLUMNS = {
    "rows": lambda rows: str(len(rows)),
    "updates a call": _updates,
    "evaluations differ by": _difference,
    "running variance, float32": _variance("float32"),
    "bfloat16": _variance("bfloat16"),
    "n = 1": _one_value,
    "memory after NaN, inf": _bad_batch,
}
