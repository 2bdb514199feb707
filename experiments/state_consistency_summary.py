"""The matrix in a few lines: what each layer does with its running statistics."""

from collections.abc import Callable

import numpy as np

from . import results
from .state_consistency_claims import variance_error
from .state_consistency_layers import BY_NAME
from .state_consistency_rows import FINITE, Row

SHAPE = (1, 2, 3)  # the thread's


def table(rows: list[Row]) -> str:
    lines = []
    for name in dict.fromkeys(setting.layer for setting, _ in rows):
        of_layer = [row for row in rows if row[0].layer == name]
        lines.append((name, str(len(of_layer)), *(cell(of_layer) for cell in COLUMNS.values())))
    return results.table(("layer", "rows", *COLUMNS), lines)


def _updates(rows: list[Row]) -> str:
    counts = [count for _, found in rows for count in (found.updates_1, found.updates_2)]
    return _joined({f"{count:.0f}" for count in counts if np.isfinite(count)})


def _difference(rows: list[Row]) -> str:
    return _joined(
        {
            f"{found.difference:.2f}"
            for setting, found in rows
            if (setting.dtype, setting.shape) == ("float32", SHAPE)
        }
    )


def _variance(dtype: str) -> Callable[[list[Row]], str]:
    def cell(rows: list[Row]) -> str:
        several = [row for row in rows if row[0].dtype == dtype and row[0].n > 1]
        # Where a call is two updates, what one of them took in cannot be told.
        counted = [row for row in several if not row[1].raised and _updates([row]) == "1"]
        if not counted:
            return "fails" if several else "-"
        kind = "unbiased" if BY_NAME[counted[0][0].layer].unbiased else "biased"
        return f"{kind}, to {max(map(variance_error, counted)):.0e}"

    return cell


def _one_value(rows: list[Row]) -> str:
    said = set()
    for setting, found in rows:
        # Whether a layer can be run in bfloat16 is another column's.
        if setting.n > 1 or setting.dtype != "float32":
            continue
        if found.raised:
            touched = "" if found.memory_0 == found.memory_1 else ", memory changed"
            said.add(found.raised.partition(":")[0] + touched)
        else:
            nonfinite = found.nonfinite_training + found.nonfinite_evaluation
            said.add("NaN" if nonfinite else "finite")
    return _joined(said)


def _bad_batch(rows: list[Row]) -> str:
    said = set()
    for setting, found in rows:
        if setting.batch == FINITE or found.raised:
            continue
        kept = "kept" if found.memory_1 == found.memory_2 else "changed"
        counted = ", counted" if found.rejected == 1 else ""
        said.add("lost for ever" if found.nonfinite_later else kept + counted)
    return _joined(said)


def _joined(said: set[str]) -> str:
    return " or ".join(sorted(said)) or "-"


COLUMNS = {
    "updates a call": _updates,
    "evaluations differ by": _difference,
    "running variance, float32": _variance("float32"),
    "bfloat16": _variance("bfloat16"),
    "n = 1": _one_value,
    "memory after NaN, inf": _bad_batch,
}
