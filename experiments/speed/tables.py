"""Makes the tables of what was measured."""

import math
from collections.abc import Callable, Iterable

from experiments.lab.claims import verdicts_table
from experiments.lab.experiment import Report
from experiments.lab.peers import names
from experiments.lab.tables import grid, table

from .cases import BOTH, KERNELS, NO_NORM, OWN, PEERS, ROWS, shape_name
from .claims import Rows, ratios, verdicts
from .roofline import MEMORY_COPY, PARTS
from .rows import NOT_SERVED, Row, by_shape, chosen

COLUMNS = (*PEERS, NO_NORM, PARTS, MEMORY_COPY)


def report(rows: Rows) -> Report:
    """Returns all tables; the claims last, so that the end of the output has them."""
    judged = verdicts(rows)
    claims = verdicts_table(judged)
    timed = [r for r in rows if r.part in ("layer_norm", "time", "training") and r.calls]
    kinds = dict.fromkeys((row.part, row.dtype, row.layout, row.program) for row in timed)
    tables = [_times(timed, *kind) for kind in kinds]
    tables += [_of_layer_norm(rows), *_compilation(rows), wrong_choices(rows), _copies(rows)]
    summary = _times(timed, "time", "f32", OWN, BOTH)
    beside = [v.measured for v in judged if v.claim.startswith(("2.", "3.", "4."))]
    return Report(
        "\n\n".join(filter(None, [*tables, *_notes(rows), claims])),
        judged,
        summary=f"{summary}\n\n{claims}" if summary else claims,
        ours="batch norm + ReLU, forward + backward: 1",
        peers="its time: " + ", ".join(beside),
    )


def _times(timed: Rows, part: str, dtype: str, layout: str, program: str) -> str:
    """Returns the medians in milliseconds, three digits."""
    mine = chosen(timed, part=part, dtype=dtype, layout=layout, program=program)
    unit = "ms, layer norm" if part == "layer_norm" else "ms"
    if any(not math.isnan(row.share) for row in mine):
        unit += " (*: the host's), share of copy"
    words = (unit, layout if layout not in (OWN, ROWS) else "", dtype, program)
    return _by_peer(", ".join(filter(None, words)), mine, _time)


def _compilation(rows: Rows) -> list[str]:
    """Returns temporaries of forward + backward, and seconds to compile it."""
    mine = chosen(rows, part="compile", program=BOTH)
    tables = [
        _by_peer(
            f"temporaries / bytes of x; s to compile; {dtype}",
            chosen(mine, dtype=dtype),
            lambda row: f"{row.temporaries:.2f}; {row.compile_seconds:.2f}",
        )
        for dtype in dict.fromkeys(row.dtype for row in mine)
    ]
    title = "s to compile 50 x (linear, norm, ReLU), forward + backward"
    stack = chosen(rows, part="stack")
    return [*tables, _by_peer(title, stack, lambda row: f"{row.compile_seconds:.2f}")]


def _of_layer_norm(rows: Rows) -> str:
    """Returns this layer norm's time over the others'."""
    timed = chosen(rows, part="layer_norm")
    found = {
        (f"{name}, {ours.dtype}, {ours.program}", ours.shape): f"{value:.2f}"
        for name in PEERS
        for value, ours, _ in ratios(timed, (name,))
        if name != names.OURS
    }
    lines = list(dict.fromkeys(line for line, _ in found))
    shapes = dict.fromkeys(r.shape for r in chosen(timed, peer=names.OURS) if r.calls)
    columns = {shape_name(shape): shape for shape in shapes}
    title = "layer norm: time, this layer over"
    return grid(title, lines, columns, lambda *at: found.get(at, "-")) if found else ""


def wrong_choices(rows: Rows) -> str:
    """Returns where, on a GPU, "auto" should have taken another implementation."""
    found = ratios(chosen(rows, device="gpu"), (names.OURS_XLA, *KERNELS))
    body = [
        (ours.place, _time(ours), better.peer, _time(better))
        for _, ours, better in (ratio for ratio in found if ratio.slower)
    ]
    return table(("where auto chose wrongly", "ms", "better", "ms"), body) if body else ""


def _copies(rows: Rows) -> str:
    found = chosen(rows, part="copy")
    body = [(r.peer, r.note or f"{2 * r.bytes / r.median / 1e6:.0f}") for r in found]
    return table(("copy", "GB/s"), body) if body else ""


def _notes(rows: Rows) -> list[str]:
    """Returns what failed, and what a kernel that was asked for by name said it cannot do."""
    lines = [f"{row.peer}, {row.part} {row.place}: {row.note}" for row in rows if row.failed]
    refused = [row for row in rows if row.note.startswith(NOT_SERVED)]
    for name in dict.fromkeys(row.peer for row in refused):
        of_it = chosen(refused, peer=name)
        lines.append(f"{name}: {len(of_it)} rows {of_it[0].note}")
    return lines


def _time(row: Row) -> str:
    share = "" if math.isnan(row.share) else f" {row.share:.0%}"
    return f"{row.median:#.3g}{'*' if row.of_host else ''}{share}"


def _by_peer(title: str, rows: Iterable[Row], cell: Callable[[Row], str]) -> str:
    """Returns a line for each shape and a column for each peer; nothing of no rows."""
    found = {shape_name(shape): peers for shape, peers in by_shape(rows).items()}
    columns = [n for n in COLUMNS if any(n in peers for peers in found.values())]
    made = grid(title, found, columns, lambda peers, n: cell(peers[n]) if n in peers else "-")
    return made if found else ""
