"""Makes the tables of the experiment from its rows."""

import math
from collections.abc import Callable, Iterable, Mapping

from experiments.lab import rows as csv
from experiments.lab.claims import verdicts_table
from experiments.lab.experiment import Files, Report
from experiments.lab.peers import names
from experiments.lab.tables import grid, table

from . import cases
from .cases import BOTH, COLD, HOT, INFERENCE, OWN, PEERS, ROWS, shape_name
from .claims import verdicts
from .programs import ROOFLINE
from .ratios import Rows, mean, ratios
from .rows import Row, by_shape, chosen

# Of several peers the fastest on each array.
GROUPS = {"Equinox": cases.EQUINOX, "Flax": cases.FLAX, "PyTorch": (names.TORCH,)}
SWAPPED = "forward + backward, cold, separate ReLU"
# This layer, and of what times; by column.
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    SWAPPED: (names.OURS_SEPARATE, {"program": BOTH, "cache": COLD}),
    "the same, activation=": (names.OURS, {"program": BOTH, "cache": COLD}),
    "hot, separate ReLU": (names.OURS_SEPARATE, {"program": BOTH, "cache": HOT}),
    "hot, activation=": (names.OURS, {"program": BOTH, "cache": HOT}),
    "inference, cold": (names.OURS, {"program": INFERENCE, "cache": COLD}),
}
COLUMNS = (*PEERS, cases.NO_NORM, *reversed(ROOFLINE))


def report(files: Files) -> Report:
    """Returns all tables; the claims last, so that the end of the output has them."""
    rows = csv.load(files.csv(), Row)
    judged = verdicts(rows)
    claims = verdicts_table(judged)
    timed = [r for r in rows if r.part in ("layer_norm", "time", "training") and r.calls]
    kinds = dict.fromkeys((r.part, r.dtype, r.layout, r.program, r.cache) for r in timed)
    tables = [_times(timed, *kind) for kind in kinds]
    failed = [f"{r.peer}, {r.part} {r.place}: {r.note}" for r in rows if r.failed]
    tables += [_of_layer_norm(timed), *_compilation(rows), _residual(rows), _copies(rows)]
    speed_ups = _speed_ups(timed)
    summary = [speed_ups, _times(timed, "time", "f32", OWN, BOTH, COLD), _residual(rows)]
    beside = [f"{name} {found}" for name, found in _beside(timed, *WAYS[SWAPPED]).items()]
    return Report(
        "\n\n".join(filter(None, [*tables, "\n".join(failed), speed_ups, claims])),
        judged,
        summary="\n\n".join(filter(None, [*summary, claims])),
        ours="batch norm, ReLU, forward + backward, cold: 1" if beside else "",
        peers=f"its time: {', '.join(beside)}" if beside else "",
    )


def _beside(timed: Rows, ours: str, fields: Mapping[str, str]) -> dict[str, str]:
    """Returns by group of peers how many times as long they take, on the geometric mean.

    Array by array the fastest of the group counts.
    """
    found = {}
    for name, group in GROUPS.items():
        among = ratios(chosen(timed, part="time", dtype="f32", **fields), group, ours=(ours,))
        if among:
            found[name] = f"{1 / mean(among):.2f} x"
    return found


def _speed_ups(timed: Rows) -> str:
    columns = {title: _beside(timed, ours, fields) for title, (ours, fields) in WAYS.items()}
    lines = [name for name in GROUPS if any(name in found for found in columns.values())]
    title = "times as long as this layer, f32"
    made = grid(title, lines, columns, lambda name, found: found.get(name, "-"))
    return made if lines else ""


def _times(timed: Rows, part: str, dtype: str, layout: str, program: str, cache: str) -> str:
    """Returns the medians in milliseconds, three digits."""
    mine = chosen(timed, part=part, dtype=dtype, layout=layout, program=program, cache=cache)
    unit = "ms, layer norm" if part == "layer_norm" else "ms"
    if any(not math.isnan(row.share) for row in mine):
        unit += " (*: the host's), share of copy"
    words = (unit, layout if layout not in (OWN, ROWS) else "", dtype, program, cache)
    return _by_peer(", ".join(filter(None, words)), mine, _time)


def _time(row: Row) -> str:
    share = "" if math.isnan(row.share) else f" {row.share:.0%}"
    return f"{row.median:#.3g}{'*' if row.of_host else ''}{share}"


def _compilation(rows: Rows) -> list[str]:
    """Returns temporaries, and seconds to compile, of a layer and of networks."""
    layer = chosen(rows, part="compile")
    dtypes = dict.fromkeys(row.dtype for row in layer)
    title = "temporaries / bytes of x; s to compile"
    tables = [
        _by_peer(
            f"{title}; {dtype}",
            chosen(layer, dtype=dtype),
            lambda row: f"{row.temporaries:.2f}; {row.compile_seconds:.2f}",
        )
        for dtype in dtypes
    ]
    return [*tables, _by_program("s to compile: trace, lower, in all", rows, "networks", _s)]


def _s(row: Row) -> str:
    seconds = row.trace_seconds, row.lower_seconds, row.compile_seconds
    return ", ".join(f"{s:.2f}" for s in seconds)


def _residual(rows: Rows) -> str:
    title = "bytes that a pre-activation block moves, over those of x"
    return _by_program(title, rows, "residual", lambda row: f"{row.units:.1f}")


def _by_program(title: str, rows: Rows, part: str, cell: Callable[[Row], str]) -> str:
    """Returns a line for each program and a column for each peer; nothing of no rows."""
    found = {(row.program, row.peer): row for row in chosen(rows, part=part) if not row.note}
    lines, columns = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    made = grid(title, lines, columns, lambda *at: cell(found[at]) if at in found else "-")
    return made if found else ""


def _of_layer_norm(timed: Rows) -> str:
    """Returns this layer norm's time over the others'."""
    found = {
        (
            ", ".join(filter(None, (name, ours.dtype, ours.program, ours.cache))),
            shape_name(ours.shape),
        ): f"{value:.2f}"
        for name in PEERS
        for value, ours, other in ratios(chosen(timed, part="layer_norm"), (name,))
        if other is not ours
    }
    lines, shapes = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    made = grid(
        "layer norm: time, this layer over", lines, shapes, lambda *at: found.get(at, "-")
    )
    return made if found else ""


def _copies(rows: Rows) -> str:
    found = chosen(rows, part="copy")
    body = [(r.peer, r.note or f"{2 * r.bytes / r.median / 1e6:.0f}") for r in found]
    return table(("copy", "GB/s"), body) if body else ""


def _by_peer(title: str, rows: Iterable[Row], cell: Callable[[Row], str]) -> str:
    """Returns a line for each shape and a column for each peer; nothing of no rows."""
    found = {shape_name(shape): peers for shape, peers in by_shape(rows).items()}
    columns = [n for n in COLUMNS if any(n in peers for peers in found.values())]
    made = grid(title, found, columns, lambda peers, n: cell(peers[n]) if n in peers else "-")
    return made if found else ""
