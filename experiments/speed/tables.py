"""Makes the tables of what was measured."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from experiments.lab.claims import verdicts_table
from experiments.lab.experiment import Report
from experiments.lab.peers import names
from experiments.lab.tables import table

from .cases import (
    BOTH,
    KERNELS,
    NO_NORM,
    OWN,
    PEERS,
    ROWS,
    shape_name,
)
from .claims import APART, Rows, side_by_side, verdicts
from .roofline import MEMORY_COPY, PARTS
from .rows import NOT_SERVED, Row

COLUMNS = (*PEERS, NO_NORM, PARTS, MEMORY_COPY)


def report(rows: Rows) -> Report:
    """Returns all tables; the claims last, so that the end of the output has them."""
    judged = verdicts(rows)
    claims = verdicts_table(judged)
    kinds = dict.fromkeys(
        (row.part, row.dtype, row.layout, row.program)
        for row in rows
        if row.part in ("layer_norm", "time", "training") and row.calls
    )
    tables = [times(rows, *kind) for kind in kinds]
    tables += [of_layer_norm(rows), *compilation(rows), wrong_choices(rows), copies(rows)]
    summary = times(rows, "time", "f32", OWN, BOTH)
    beside = [v.measured for v in judged if v.claim.startswith(("2.", "3.", "4."))]
    return Report(
        "\n\n".join(filter(None, [*tables, *notes(rows), claims])),
        judged,
        summary=f"{summary}\n\n{claims}" if summary else claims,
        ours="batch norm + ReLU, forward + backward: 1",
        peers="its time: " + ", ".join(beside),
    )


def times(rows: Rows, part: str, dtype: str, layout: str, program: str) -> str:
    """Returns the medians in milliseconds, three digits."""
    kind = part, dtype, layout, program
    mine = [r for r in rows if (r.part, r.dtype, r.layout, r.program) == kind and r.calls]
    unit = "ms, layer norm" if part == "layer_norm" else "ms"
    if any(not math.isnan(row.share) for row in mine):
        unit += " (*: the host's), share of copy"
    words = (unit, layout if layout not in (OWN, ROWS) else "", dtype, program)
    return _by_shape(", ".join(filter(None, words)), mine, _time)


def compilation(rows: Rows) -> list[str]:
    """Returns temporaries of forward + backward, and seconds to compile it."""
    mine = [row for row in rows if row.part == "compile" and row.program == BOTH]
    tables = [
        _by_shape(
            f"temporaries / bytes of x; s to compile; {dtype}",
            [row for row in mine if row.dtype == dtype],
            lambda row: f"{row.temporaries:.2f}; {row.compile_seconds:.2f}",
        )
        for dtype in dict.fromkeys(row.dtype for row in mine)
    ]
    stack = [row for row in rows if row.part == "stack"]
    title = "s to compile 50 x (linear, norm, ReLU), forward + backward"
    return [*tables, _by_shape(title, stack, lambda row: f"{row.compile_seconds:.2f}")]


def of_layer_norm(rows: Rows) -> str:
    """Returns this layer norm's time over the others'."""
    found: defaultdict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    shapes: dict[str, None] = {}
    for (part, shape, dtype, _, program), peers in side_by_side(rows).items():
        if part == "layer_norm" and names.OURS in peers:
            shapes[shape_name(shape)] = None
            for name in peers.keys() - {names.OURS}:
                ratio = peers[names.OURS].median / peers[name].median
                found[name, dtype, program][shape_name(shape)] = f"{ratio:.2f}"
    keys = sorted(found, key=lambda key: PEERS.index(key[0]))
    body = [(", ".join(key), *(found[key].get(shape, "-") for shape in shapes)) for key in keys]
    return table(("layer norm: time, this layer over", *shapes), body) if body else ""


def wrong_choices(rows: Rows) -> str:
    """Returns where, on a GPU, "auto" should have taken another implementation."""
    body = []
    for peers in side_by_side(row for row in rows if row.device == "gpu").values():
        ours = [peers[n] for n in (names.OURS, names.OURS_XLA, *KERNELS) if n in peers]
        if names.OURS in peers:
            auto, best = peers[names.OURS], min(ours, key=lambda row: row.median)
            if auto.median > APART * best.median and auto.low > best.high:
                body.append((auto.place, _time(auto), best.peer, _time(best)))
    return table(("where auto chose wrongly", "ms", "better", "ms"), body) if body else ""


def copies(rows: Rows) -> str:
    found = [row for row in rows if row.part == "copy"]
    body = [(r.peer, r.note or f"{2 * r.bytes / r.median / 1e6:.0f}") for r in found]
    return table(("copy", "GB/s"), body) if body else ""


def notes(rows: Rows) -> list[str]:
    """Returns what failed, and what a kernel that was asked for by name said it cannot do."""
    lines = [f"{row.peer}, {row.part} {row.place}: {row.note}" for row in rows if row.failed]
    refused: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.note.startswith(NOT_SERVED):
            refused[row.peer].append(row)
    return [*lines, *(f"{name}: {len(r)} rows {r[0].note}" for name, r in refused.items())]


def _time(row: Row) -> str:
    share = "" if math.isnan(row.share) else f" {row.share:.0%}"
    return f"{row.median:#.3g}{'*' if row.of_host else ''}{share}"


def _by_shape(title: str, rows: Iterable[Row], cell: Callable[[Row], str]) -> str:
    """Returns a line for each shape and a column for each peer; nothing of no rows."""
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        found[shape_name(row.shape)][row.peer] = cell(row)
    columns: Sequence[str] = [n for n in COLUMNS if any(n in cells for cells in found.values())]
    body = [(shape, *(cells.get(n, "-") for n in columns)) for shape, cells in found.items()]
    return table((title, *columns), body) if body else ""
