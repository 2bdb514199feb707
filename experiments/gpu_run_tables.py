"""The tables of what was measured on a GPU, from its result file.

Making them never measures: `python -m experiments.gpu_run_tables DIR/results/gpu_NAME.csv`
prints them anew, also from a run that was cut short.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from . import command, gpu_run_claims, gpu_run_rows, results
from .accuracy_claims import Verdict
from .gpu_run_claims import APART, Timings
from .gpu_run_contenders import AUTO, OURS_BY
from .gpu_run_rows import COPY, LAYER_NORM, LAYERS, TRAIN, Row

WORDS = {True: "holds", False: "DOES NOT HOLD", None: "not run"}


def _copies(rows: Sequence[Row]) -> str:
    copies = [row for row in rows if row.part == COPY]
    return results.table(
        ("copy", "GB/s"), [(r.contender, r.note or f"{r.value:.0f}") for r in copies]
    )


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    share = "" if math.isnan(row.share) else f" {row.share:.0%}"
    return f"{row.median:#.3g}{'*' if row.of_host else ''}{share}"


def _timings(found: Timings) -> list[str]:
    """One table for each layout, dtype and pass: a line for each array."""
    tables = []
    kinds = dict.fromkeys(
        (k[0], k[2], k[3], k[4]) for k in found if k[0] in (LAYERS, LAYER_NORM)
    )
    for part, layout, dtype, program in kinds:
        mine = {
            k[1]: c
            for k, c in found.items()
            if (k[0], *k[2:]) == (part, layout, dtype, program)
        }
        names = list(dict.fromkeys(name for contenders in mine.values() for name in contenders))
        header = f"ms (*: the host's), share of copy: {layout}, {dtype}, {program}"
        rows = [(what, *(_cell(c.get(name)) for name in names)) for what, c in mine.items()]
        tables.append(results.table((header, *names), rows))
    steps = {(k[1], k[3]): c for k, c in found.items() if k[0] == TRAIN}
    if steps:
        names = list(
            dict.fromkeys(name for contenders in steps.values() for name in contenders)
        )
        rows = [
            (f"{what} {dtype}", *(_cell(c.get(n)) for n in names))
            for (what, dtype), c in steps.items()
        ]
        tables.append(results.table(("ms, training step", *names), rows))
    return tables


def choices(found: Timings) -> str:
    """Where "auto" should have taken another implementation: what its heuristics follow."""
    rows = []
    for contenders in found.values():
        ours = [contenders[name] for name in OURS_BY.values() if name in contenders]
        if AUTO in contenders:
            auto, best = contenders[AUTO], min(ours, key=lambda row: row.median)
            if auto.median > APART * best.median and auto.low > best.high:
                rows.append(
                    (gpu_run_claims.place(auto), _cell(auto), best.contender, _cell(best))
                )
    return (
        results.table(("where auto chose wrongly", "ms", "better", "ms"), rows) if rows else ""
    )


def _notes(rows: Sequence[Row]) -> list[str]:
    lines = [
        f"{r.contender}, {r.part} {gpu_run_claims.place(r)}: {r.note}" for r in rows if r.failed
    ]
    for name, refused in gpu_run_claims.not_served(rows).items():
        lines.append(f"{name}: {len(refused)} rows {refused[0].note}")
    return lines


def claims(verdicts: Sequence[Verdict]) -> str:
    return results.table(
        ("claim", "measured", "verdict"),
        [(v.claim, v.measured, WORDS[v.holds]) for v in verdicts],
    )


def report(rows: Sequence[Row], verdicts: Sequence[Verdict], *, gpu: bool) -> str:
    """All tables; the claims last, so that the end of the output has them."""
    found = gpu_run_claims.timings(rows)
    chosen = choices(found) if gpu else ""
    parts = [*_timings(found), chosen, _copies(rows), *_notes(rows), claims(verdicts)]
    return "\n\n".join(part for part in parts if part)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.plain_parser("gpu_run_tables", __doc__)
    parser.add_argument("csv", type=Path, nargs="+", metavar="CSV", help="a result file")
    for path in parser.parse_args(arguments).csv:
        loaded = gpu_run_rows.load(path)
        on_gpu = path.stem != "gpu_cpu"
        print(report(loaded, gpu_run_claims.judge(loaded, gpu=on_gpu), gpu=on_gpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
