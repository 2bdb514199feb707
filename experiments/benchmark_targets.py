"""The targets of the benchmark, each with its measured number and a verdict."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .benchmark_agreement import TOLERANCE
from .benchmark_layers import BOTH, EQUINOX, FLAX, INVARIANT, OURS
from .benchmark_parts import PARTS
from .benchmark_runs import Row, Runs, Shape, named

MIB = 2**20
# Below so many values a call is mostly dispatch, whose cost does not grow.
GROWS_FROM = 2**18
BY_TWO, BY_THREE = "powers of 2", "powers of 3"


class Verdict(NamedTuple):
    target: str
    measured: str
    holds: bool | None  # None: not everything that it takes was measured


class _NotRunError(Exception):
    pass


class Ratio(NamedTuple):
    """This layer's number over another's, on some shape."""

    value: float
    other: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.value:.2f} of {self.other} on {named(self.shape)}"


def _rows(runs: Runs, dtype: str, part: str = "layer") -> dict[tuple[Shape, str], Row]:
    return {
        (row.shape, row.contestant): row
        for row in runs
        if row.part == part and row.dtype == dtype and row.program == BOTH
    }


def _ratios(
    runs: Runs,
    others: Sequence[str],
    *,
    dtype: str = "f32",
    part: str = "layer",
    of: Callable[[Row], float] = lambda row: row.median,
    where: Callable[[Row], bool] = lambda row: True,
) -> list[Ratio]:
    """Per shape, of this layer's number to the least of the others'."""
    rows, ratios = _rows(runs, dtype, part), []
    for (shape, contestant), row in rows.items():
        theirs = [rows[shape, other] for other in others if (shape, other) in rows]
        theirs = [other for other in theirs if not math.isnan(of(other))]
        if contestant == OURS and where(row) and theirs and not math.isnan(of(row)):
            best = min(theirs, key=of)
            ratios.append(Ratio(of(row) / of(best), best.contestant, shape))
    if not ratios:
        raise _NotRunError
    return ratios


def _mean(ratios: Iterable[Ratio]) -> float:
    return math.exp(np.mean([math.log(ratio.value) for ratio in ratios]))


PEERS = (*EQUINOX, *FLAX, "torch")


def _large(row: Row) -> bool:
    return row.bytes >= MIB


def _faster(runs: Runs, others: Sequence[str], target: float) -> tuple[str, bool]:
    """Than the fastest of the others on each shape; on the geometric mean over the shapes."""
    speed_up = 1 / _mean(_ratios(runs, others))
    each = []
    for other in others if len(others) > 1 else ():
        try:
            each.append(f"{1 / _mean(_ratios(runs, (other,))):.2f} x {other}")
        except _NotRunError:
            each.append(f"{other} not run")
    return f"{speed_up:.2f} x" + (f" ({', '.join(each)})" if each else ""), speed_up >= target


def _at_most(ratios: Sequence[Ratio], target: float) -> tuple[str, bool]:
    worst = max(ratios)
    return str(worst), worst.value <= target


def _values(runs: Runs, of: Callable[[Row], float], dtype: str, contestant: str = "") -> list:
    values = [
        (of(row), row)
        for row in runs
        if row.part == "layer" and row.dtype == dtype and not math.isnan(of(row))
        if contestant in ("", row.contestant)
    ]
    if not values:
        raise _NotRunError
    return values


def _temporaries(runs: Runs) -> tuple[str, bool]:
    values = _values(runs, lambda row: row.temporaries, "f32", OURS)
    most, row = max(values, key=lambda pair: pair[0])
    return f"{most:.3f} of x's bytes on {named(row.shape)}", most <= 0.1


def _agreement(runs: Runs) -> tuple[str, bool]:
    values = _values(runs, lambda row: row.deviation, "f32")
    most, row = max(values, key=lambda pair: pair[0])
    return f"{most:.1e} ({row.contestant} on {named(row.shape)})", most <= TOLERANCE["f32"]


def _compile(runs: Runs, part: str) -> tuple[str, bool]:
    ratios = _ratios(runs, EQUINOX, part=part, of=lambda row: row.compile_seconds)
    mean = _mean(ratios)
    others = sorted({ratio.other for ratio in ratios})
    return f"{mean:.2f} of {' and '.join(others)}", mean <= 1


def growing(runs: Runs) -> dict[str, Runs]:
    """The rows of the growth: those with a power of two as N, and the others."""
    kinds: dict[str, Runs] = {}
    for row in runs:
        if row.part == "growth":
            kind = BY_TWO if row.shape[0].bit_count() == 1 else BY_THREE
            kinds.setdefault(kind, []).append(row)
    return kinds


def growth(rows: Runs) -> tuple[float, float]:
    """Exponent and factor: milliseconds = factor * values ** exponent."""
    rows = [row for row in rows if math.prod(row.shape) > GROWS_FROM]
    if len(rows) < 2:
        raise _NotRunError
    values = np.log([math.prod(row.shape) for row in rows])
    exponent, intercept = np.polyfit(values, np.log([row.median for row in rows]), 1)
    return float(exponent), math.exp(intercept)


def _growth(runs: Runs) -> tuple[str, bool]:
    """Judged by the powers of two alone; see benchmark_growth."""
    rows = growing(runs)
    exponent, _ = growth(rows.get(BY_TWO, []))
    beside = f"; {growth(rows[BY_THREE])[0]:.3f} for {BY_THREE}" if BY_THREE in rows else ""
    return f"exponent {exponent:.3f}{beside}", 0.9 <= exponent <= 1.1


def _invariance(runs: Runs) -> tuple[str, bool]:
    """Of the normal mode's, in either dtype."""
    rows = {
        (row.shape, row.dtype, row.contestant): row.median
        for row in runs
        if row.part == "layer" and row.program == BOTH and not math.isnan(row.median)
    }
    ratios = [
        (of / rows[shape, dtype, OURS], f"{named(shape)} {dtype}")
        for (shape, dtype, contestant), of in rows.items()
        if contestant == INVARIANT and (shape, dtype, OURS) in rows
    ]
    if not ratios:
        raise _NotRunError
    worst, where = max(ratios)
    return f"{worst:.2f} of {OURS} on {where}", worst <= 2


SAME = "1. f32: all contestants give the same, to 1e-4"
LEAN = "8. f32: temporaries at most 0.1 of x's bytes"
# Times are of forward + backward; "the faster" is so shape by shape.
TARGETS: dict[str, Callable[[Runs], tuple[str, bool]]] = {
    SAME: _agreement,
    "2. f32: 3 times as fast as Equinox's layer, its faster mode": (
        lambda runs: _faster(runs, EQUINOX, 3.0)
    ),
    "3. f32: 1.3 times as fast as Flax, the faster of its two": (
        lambda runs: _faster(runs, FLAX, 1.3)
    ),
    "4. f32: 1.4 times as fast as torch": lambda runs: _faster(runs, ("torch",), 1.4),
    "5. f32, 1 MiB or more: slower than no other on any shape": (
        lambda runs: _at_most(_ratios(runs, PEERS, where=_large), 1.0)
    ),
    "6. f32, below 1 MiB: at most 1.1 of the fastest": (
        lambda runs: _at_most(_ratios(runs, PEERS, where=lambda row: not _large(row)), 1.1)
    ),
    "7. f32, over 8 MiB: at most 1.15 of the sum of its parts": (
        lambda runs: _at_most(
            _ratios(runs, (PARTS,), where=lambda row: row.bytes > 8 * MIB), 1.15
        )
    ),
    LEAN: _temporaries,
    "9. bf16, 1 MiB or more: no slower than torch": (
        lambda runs: _at_most(_ratios(runs, ("torch",), dtype="bf16", where=_large), 1.0)
    ),
    "10. one layer compiles no slower than Equinox's": lambda runs: _compile(runs, "layer"),
    "11. so does a stack of 50": lambda runs: _compile(runs, "stack"),
    "12. the cost grows linearly: exponent 0.9 to 1.1": _growth,
    "13. the device-invariant mode: at most twice the time": _invariance,
}


def judge(runs: Runs) -> list[Verdict]:
    verdicts = []
    for target, measure in TARGETS.items():
        try:
            verdicts.append(Verdict(target, *measure(runs)))
        except _NotRunError:
            verdicts.append(Verdict(target, "not run", None))
    return verdicts
