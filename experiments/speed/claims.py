"""Judges what is claimed of this layer's speed, on a CPU and on a GPU."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from experiments.lab.claims import Claim, NotMeasured, Verdict, worst
from experiments.lab.peers import names

from .cases import (
    BATCH_NORMS,
    BOTH,
    COLD,
    EQUINOX,
    FIRST,
    FLAX,
    FORWARD,
    IN_TORCH,
    INFERENCE,
    LARGE,
    LAST,
    MIB,
    ROWS,
)
from .ratios import VALUE, Ratio, Rows, mean, ratios
from .rows import DIFFERS, Row, chosen, measured

Judge = Callable[[Rows], tuple[str, bool]]

# Below so many values a call is mostly dispatch, whose cost does not grow.
GROWS_FROM = 2**18
BY_TWO, BY_THREE = "powers of 2", "powers of 3"

# On a GPU.
SHARE, EQUINOX_FACTOR = 0.85, 1.5

# Claims of a kind. Times are of forward + backward; of several others the best counts, array
# by array.


def _faster(
    others: Sequence[str], target: float, ours: str = names.OURS, **fields: Any
) -> Judge:
    """Judges how many times as fast it is, on the geometric mean over the arrays."""

    def judged(rows: Rows) -> tuple[str, bool]:
        timed = chosen(rows, part="time", program=BOTH, **fields)
        speed_up = 1 / mean(ratios(timed, others, ours=(ours,)))
        each = ((other, ratios(timed, (other,), ours=(ours,))) for other in others)
        said = ", ".join(f"{1 / mean(found):.2f} x {other}" for other, found in each if found)
        beside = f" ({said})" if len(others) > 1 else ""
        return f"{speed_up:.2f} x{beside}", speed_up >= target

    return judged


def _at_most(
    target: float,
    others: Sequence[str],
    only: Callable[[Row], bool] = lambda row: True,
    ours: Sequence[str] = (names.OURS,),
    **fields: Any,
) -> Judge:
    """Judges the largest ratio of times."""

    def judged(rows: Rows) -> tuple[str, bool]:
        timed = chosen(rows, **{"part": "time", "program": BOTH} | fields)
        largest, ratio = worst(ratios(list(filter(only, timed)), others, ours=ours), VALUE)
        return str(ratio), largest <= target

    return judged


def _share(part: str, layout: str) -> Judge:
    """Judges the least share of a copy's bandwidth, on large arrays."""

    def judged(rows: Rows) -> tuple[str, bool]:
        found = measured(rows, "share", part=part, layout=layout, peer=names.OURS)
        found = [row for row in found if row.bytes > LARGE]
        _, least = worst(found, lambda row: -row.share)
        enough = sum(row.share >= SHARE for row in found)
        said = f"{enough} of {len(found)}; least {least.share:.0%} ({least.place})"
        return said, enough == len(found)

    return judged


def _never_slower(
    others: Sequence[str], part: str, ours: Sequence[str] = (names.OURS,), **fields: Any
) -> Judge:
    def judged(rows: Rows) -> tuple[str, bool]:
        found = ratios(chosen(rows, part=part, **fields), others, ours=ours)
        slower = [ratio for ratio in found if ratio.slower]
        of_host = sum(ratio.ours.of_host for ratio in slower)
        said = f"slower on {len(slower)} of {len(found)}"
        said += f", on {of_host} waiting for the host" if of_host else ""
        return f"{said}; worst {worst(slower or found, VALUE)[1]}", not slower

    return judged


# Claims of one quantity.


def _agreement(rows: Rows) -> tuple[str, bool]:
    found, said = measured(rows, "deviation", part="agreement"), []
    for dtype in dict.fromkeys(row.dtype for row in found):
        largest, row = worst(chosen(found, dtype=dtype), lambda row: row.deviation)
        said.append(f"{dtype} to {largest:.1e} ({row.peer} on {row.where})")
    differ = chosen(found, note=DIFFERS)
    said += [f"not {row.peer} on {row.where}" for row in differ]
    if not said:
        raise NotMeasured
    return "; ".join(said), not differ


def _bits(rows: Rows) -> tuple[str, bool]:
    found = measured(rows, "differing", part="bits")
    most, row = worst(found, lambda row: row.differing)
    beside = f" ({row.peer}, {row.place})" if most else ""
    return f"{most:g} of {row.calls} runs differ{beside}; {len(found)} results", not most


def _temporaries(rows: Rows) -> tuple[str, bool]:
    found = measured(rows, "temporaries", part="compile", peer=names.OURS, dtype="f32")
    most, row = worst(found, lambda row: row.temporaries)
    return f"{most:.3f} of x's bytes on {row.where}", most <= 0.1


def _residual(rows: Rows) -> tuple[str, bool]:
    """Judges whether each of more blocks moves as much, to 1%, and less than Equinox's."""
    counted = chosen(rows, part="residual")
    found = ratios(counted, (names.EQUINOX_BATCH,), of="units", ours=(names.OURS_SEPARATE,))
    if not found:
        raise NotMeasured
    ours, other = ([getattr(r, who).units for r in found] for who in ("ours", "other"))
    of, to = (f"{ours[i]:.1f} (Equinox: {other[i]:.1f})" for i in (0, -1))
    said = f"{of} in {found[0].ours.program}, {to} in {found[-1].ours.program}"
    return said, max(ours) <= 1.01 * ours[0] and worst(found, VALUE)[0] < 1


def _layer_compiles(rows: Rows) -> tuple[str, bool]:
    timed = chosen(rows, part="compile", dtype="f32")
    average = mean(ratios(timed, EQUINOX, of="compile_seconds"))
    return f"{average:.2f} of the faster of its modes", average <= 1


def _networks_compile(rows: Rows) -> tuple[str, bool]:
    timed = chosen(rows, part="networks")
    others, of = (names.EQUINOX_BATCH,), "compile_seconds"
    found = ratios(timed, others, of=of, ours=(names.OURS_SEPARATE,))
    largest, _ = worst(found, VALUE)
    return "; ".join(map(_stages, found)), largest <= 1.1


def _stages(ratio: Ratio) -> str:
    traced, lowered, compiled = (
        stage(ratio.ours) / stage(ratio.other)
        for stage in (
            lambda row: row.trace_seconds,
            lambda row: row.lower_seconds,
            lambda row: row.compile_seconds - row.trace_seconds - row.lower_seconds,
        )
    )
    stages = f"trace {traced:.2f}, lower {lowered:.2f}, compile {compiled:.2f}"
    return f"{ratio.ours.program} {ratio.value:.2f} ({stages})"


def _nothing_failed(rows: Rows) -> tuple[str, bool]:
    failed = sum(row.failed for row in rows)
    return f"{failed} of {len(rows)} rows" if failed else f"{len(rows)} rows", not failed


def growing(rows: Rows) -> dict[str, list[Row]]:
    """Returns the rows of the growth: those with a power of two as N, and the others."""
    found: dict[str, list[Row]] = {BY_TWO: [], BY_THREE: []}
    for row in measured(rows, "median", part="growth"):
        found[BY_TWO if row.shape[0].bit_count() == 1 else BY_THREE].append(row)
    return found


def growth(rows: Iterable[Row]) -> tuple[float, float]:
    """Returns exponent and factor: milliseconds = factor * values ** exponent."""
    points = [(math.prod(row.shape), row.median) for row in rows]
    points = [(values, ms) for values, ms in points if values > GROWS_FROM]
    if len(points) < 2:
        raise NotMeasured
    values, milliseconds = np.log(points).T
    exponent, intercept = np.polyfit(values, milliseconds, 1)
    return float(exponent), math.exp(intercept)


def _growth(rows: Rows) -> tuple[str, bool]:
    """Judges by the powers of two alone; see measure.Parts.growth."""
    found = growing(rows)
    exponent, _ = growth(found[BY_TWO])
    odd = found[BY_THREE]
    beside = f"; {growth(odd)[0]:.3f} for {BY_THREE}" if odd else ""
    return f"exponent {exponent:.3f}{beside}", 0.9 <= exponent <= 1.1


SWAPPED, INSIDE = "with a separate ReLU", "with activation="
ON_COLD: dict[str, Any] = {"dtype": "f32", "cache": COLD}
OVER = "over 100 MB: 85% of copy bandwidth"
SAME = "all that is timed computes the same: f32 to 1e-4, bf16 to 0.1"

ON_A_CPU: dict[str, Judge] = {
    SAME: _agreement,
    f"cold, {SWAPPED}: 2.5 times as fast as Equinox, its faster mode": _faster(
        EQUINOX, 2.5, names.OURS_SEPARATE, **ON_COLD
    ),
    f"cold, {SWAPPED}: 1.3 times as fast as Flax, the faster of its two": _faster(
        FLAX, 1.3, names.OURS_SEPARATE, **ON_COLD
    ),
    f"cold, {SWAPPED}: 1.2 times as fast as PyTorch": _faster(
        (names.TORCH,), 1.2, names.OURS_SEPARATE, **ON_COLD
    ),
    f"cold, {INSIDE}: 2.5 times as fast as Equinox": _faster(EQUINOX, 2.5, **ON_COLD),
    f"cold, {INSIDE}: 1.3 times as fast as Flax": _faster(FLAX, 1.3, **ON_COLD),
    f"cold, {INSIDE}: 1.2 times as fast as PyTorch": _faster((names.TORCH,), 1.2, **ON_COLD),
    "cold: slower than Equinox on no shape": _never_slower(
        EQUINOX, "time", ours=BATCH_NORMS, program=BOTH, **ON_COLD
    ),
    "cold, 1 MiB or more: at most 1.1 of PyTorch on any shape": _at_most(
        1.1, (names.TORCH,), lambda row: row.bytes >= MIB, BATCH_NORMS, **ON_COLD
    ),
    "cold, below 1 MiB: at most 1.3 of PyTorch on any shape": _at_most(
        1.3, (names.TORCH,), lambda row: row.bytes < MIB, BATCH_NORMS, **ON_COLD
    ),
    "cold, bf16, 1 MiB or more: no slower than PyTorch": _at_most(
        1.0, (names.TORCH,), lambda row: row.bytes >= MIB, dtype="bf16", cache=COLD
    ),
    "inference, hot and cold: no slower than Equinox": _at_most(
        1.0, EQUINOX, program=INFERENCE
    ),
    "layer norm, f32, forward: no slower than Equinox": _at_most(
        1.0, (names.EQUINOX,), part="layer_norm", program=FORWARD, dtype="f32"
    ),
    "layer norm, f32, forward + backward: at most 1.5 of PyTorch": _at_most(
        1.5, (names.TORCH,), part="layer_norm", dtype="f32"
    ),
    "the cost grows linearly: exponent 0.9 to 1.1": _growth,
    "f32: temporaries at most 0.1 of x's bytes": _temporaries,
    "a pre-activation block moves as many bytes of x, however many there are": _residual,
    "one layer compiles no slower than Equinox's": _layer_compiles,
    f"networks, {SWAPPED}, compile in at most 1.1 of the time": _networks_compile,
    "nothing failed": _nothing_failed,
}
ON_A_GPU: dict[str, Judge] = {
    "the same bits in every run, forward and backward": _bits,
    SAME: _agreement,
    f"batch norm, {LAST}, {OVER}": _share("time", LAST),
    f"batch norm, {FIRST}, {OVER}": _share("time", FIRST),
    f"layer norm, {OVER}": _share("layer_norm", ROWS),
    "1.5 times as fast as Equinox's batch norm, forward + backward, on average": _faster(
        (names.EQUINOX_BATCH,), EQUINOX_FACTOR
    ),
    "and so on every array": _at_most(1 / EQUINOX_FACTOR, (names.EQUINOX_BATCH,)),
    "batch norm: no slower than PyTorch's best": _never_slower(IN_TORCH, "time"),
    "layer norm: no slower than PyTorch's best": _never_slower(IN_TORCH, "layer_norm"),
    "nothing failed": _nothing_failed,
}
# The others depend on the machine: --quick does not fail of them on a CPU, and a rehearsal says
# nothing of them.
ANYWHERE = (_agreement, _bits, _temporaries, _residual, _nothing_failed)


def verdicts(rows: Rows) -> list[Verdict]:
    """Judges the claims of the device that the rows are of, numbered."""
    device = rows[0].device if rows else "cpu"
    found = []
    for i, (text, judged) in enumerate((ON_A_CPU if device == "cpu" else ON_A_GPU).items(), 1):
        made = Claim(f"{i}. {text}", judged, judged in ANYWHERE).verdict(rows)
        if device == "rehearsal" and judged not in ANYWHERE:
            made = made._replace(measured="says nothing on a CPU", holds=None)
        # Where a part was measured alone on a GPU, --quick fails of nothing else.
        found.append(made if device == "cpu" else made._replace(quick=made.holds is not None))
    return found
