"""Judges what is claimed of this layer's speed, on a CPU and on a GPU."""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from experiments.lab.claims import Claim, NotMeasured, Verdict, judge
from experiments.lab.peers import names

from .cases import (
    BOTH,
    EQUINOX,
    FIRST,
    FLAX,
    IN_TORCH,
    LARGE,
    LAST,
    MIB,
    ROWS,
    Shape,
    shape_name,
)
from .roofline import PARTS
from .rows import DIFFERS, Row

Rows = Sequence[Row]
Judge = Callable[[Rows], tuple[str, bool]]
T = TypeVar("T")

# Below so many values a call is mostly dispatch, whose cost does not grow.
GROWS_FROM = 2**18
BY_TWO, BY_THREE = "powers of 2", "powers of 3"

# On a GPU.
SHARE, EQUINOX_FACTOR = 0.85, 1.5
# Two timings of one program lie apart by a little, depending on where its arrays lie. What is
# slower by no more than this, or within the quartiles, is not called slower. How far apart
# "auto" and "xla" are where both are the same program is said beside it.
APART = 1.03

median = operator.attrgetter("median")
# Part, shape, dtype, layout, program.
Key = tuple[str, Shape, str, str, str]


def side_by_side(
    rows: Iterable[Row], of: Callable[[Row], float] = median
) -> dict[Key, dict[str, Row]]:
    """Returns the rows of all peers of which that was measured, by array and by peer."""
    found: defaultdict[Key, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if not math.isnan(of(row)):
            key = row.part, row.shape, row.dtype, row.layout, row.program
            found[key][row.peer] = row
    return dict(found)


class Ratio(NamedTuple):
    """Relates this layer's number to another's on the same array."""

    value: float
    ours: Row
    other: Row

    @property
    def slower(self) -> bool:
        """Returns whether it is slower, beyond what two timings of one program differ by."""
        return self.value > APART and self.ours.low > self.other.high

    def __str__(self) -> str:
        return f"{self.value:.2f} of {self.other.peer} on {where(self.ours)}"


def where(row: Row) -> str:
    """Returns the array in words, and the program where there are several."""
    on_cpu = row.device == "cpu" and row.part != "layer_norm"
    return shape_name(row.shape) if on_cpu else row.place


def ratios(
    rows: Rows,
    others: Sequence[str],
    *,
    part: str = "time",
    dtype: str = "",
    program: str = BOTH,
    of: Callable[[Row], float] = median,
    only: Callable[[Row], bool] = lambda row: True,
    ours: str = names.OURS,
) -> list[Ratio]:
    """Returns, array by array, our number over the least of the others'."""
    found = []
    for (of_part, _, of_dtype, _, of_program), peers in side_by_side(rows, of).items():
        asked = of_part == part and dtype in ("", of_dtype) and program in ("", of_program)
        theirs = [peers[name] for name in others if name in peers]
        if asked and theirs and ours in peers and only(peers[ours]):
            mine, best = peers[ours], min(theirs, key=of)
            found.append(Ratio(of(mine) / of(best), mine, best))
    return _some(found)


def geometric_mean(found: Iterable[Ratio]) -> float:
    return math.exp(np.mean([math.log(ratio.value) for ratio in found]))


# Claims on both.


def _agreement(rows: Rows) -> tuple[str, bool]:
    found = _measured(rows, "deviation", "agreement")
    said = []
    for dtype in dict.fromkeys(row.dtype for row in found):
        worst = max((r for r in found if r.dtype == dtype), key=lambda row: row.deviation)
        said.append(f"{dtype} to {worst.deviation:.1e} ({worst.peer} on {where(worst)})")
    differ = [row for row in found if row.note == DIFFERS]
    said += [f"not {row.peer} on {where(row)}" for row in differ]
    return "; ".join(said), not differ


def _nothing_failed(rows: Rows) -> tuple[str, bool]:
    failed = [row for row in rows if row.failed]
    said = "; ".join(f"{r.peer}, {r.part} {r.place}" for r in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    return said + more if failed else f"{len(rows)} rows", not failed


def _measured(
    rows: Rows, quantity: str, part: str, peer: str = "", dtype: str = ""
) -> list[Row]:
    """Returns the rows of a part, of one peer or of all, of which that was measured."""
    mine = [row for row in rows if row.part == part and not math.isnan(getattr(row, quantity))]
    return _some([r for r in mine if peer in ("", r.peer) and dtype in ("", r.dtype)])


def _some(found: list[T]) -> list[T]:
    """Returns what was found; where nothing was, the claim cannot be judged."""
    if not found:
        raise NotMeasured
    return found


# Claims on a CPU. Times are of forward + backward; "the faster" is so array by array.


def _faster(others: Sequence[str], target: float) -> Judge:
    """Judges how many times as fast it is, on the geometric mean over the shapes."""

    def judged(rows: Rows) -> tuple[str, bool]:
        speed_up = 1 / geometric_mean(ratios(rows, others, dtype="f32"))
        each = []
        for other in others if len(others) > 1 else ():
            try:
                mean = geometric_mean(ratios(rows, (other,), dtype="f32"))
                each.append(f"{1 / mean:.2f} x {other}")
            except NotMeasured:
                each.append(f"{other} not measured")
        beside = f" ({', '.join(each)})" if each else ""
        return f"{speed_up:.2f} x{beside}", speed_up >= target

    return judged


def _at_most(
    others: Sequence[str], target: float, only: Callable[[Row], bool], dtype: str = "f32"
) -> Judge:
    def judged(rows: Rows) -> tuple[str, bool]:
        worst = max(ratios(rows, others, dtype=dtype, only=only), key=lambda r: r.value)
        return str(worst), worst.value <= target

    return judged


def _large(row: Row) -> bool:
    return row.bytes >= MIB


def _temporaries(rows: Rows) -> tuple[str, bool]:
    found = _measured(rows, "temporaries", "compile", names.OURS, "f32")
    worst = max(found, key=lambda row: row.temporaries)
    return f"{worst.temporaries:.3f} of x's bytes on {where(worst)}", worst.temporaries <= 0.1


def _compiles(part: str) -> Judge:
    def judged(rows: Rows) -> tuple[str, bool]:
        of = operator.attrgetter("compile_seconds")
        found = ratios(rows, EQUINOX, part=part, dtype="f32", of=of)
        mean = geometric_mean(found)
        others = sorted({ratio.other.peer for ratio in found})
        return f"{mean:.2f} of {' and '.join(others)}", mean <= 1

    return judged


def growing(rows: Rows) -> dict[str, list[Row]]:
    """Returns the rows of the growth: those with a power of two as N, and the others."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if row.part == "growth" and not math.isnan(row.median):
            kind = BY_TWO if row.shape[0].bit_count() == 1 else BY_THREE
            kinds.setdefault(kind, []).append(row)
    return kinds


def growth(rows: Rows) -> tuple[float, float]:
    """Returns exponent and factor: milliseconds = factor * values ** exponent."""
    points = [(math.prod(row.shape), row.median) for row in rows]
    points = [(values, ms) for values, ms in points if values > GROWS_FROM]
    if len(points) < 2:
        raise NotMeasured
    values, milliseconds = np.log(points).T
    exponent, intercept = np.polyfit(values, milliseconds, 1)
    return float(exponent), math.exp(intercept)


def _growth(rows: Rows) -> tuple[str, bool]:
    """Judges by the powers of two alone; see parts.Parts.growth."""
    found = growing(rows)
    exponent, _ = growth(found.get(BY_TWO, []))
    beside = f"; {growth(found[BY_THREE])[0]:.3f} for {BY_THREE}" if BY_THREE in found else ""
    return f"exponent {exponent:.3f}{beside}", 0.9 <= exponent <= 1.1


def _invariance(rows: Rows) -> tuple[str, bool]:
    found = ratios(rows, (names.OURS,), ours=names.OURS_INVARIANT)
    worst = max(found, key=lambda ratio: ratio.value)
    return f"{worst} {worst.ours.dtype}", worst.value <= 2


def _layer_norm(rows: Rows) -> tuple[str, bool]:
    found = ratios(rows, (names.EQUINOX,), part="layer_norm", dtype="f32")
    values = [ratio.value for ratio in found]
    mean = geometric_mean(found)
    return f"{mean:.2f} of its time ({min(values):.2f} to {max(values):.2f})", mean < 1


PEERS = (*EQUINOX, *FLAX, names.TORCH)
SAME = Claim("all that is timed computes the same: f32 to 1e-4, bf16 to 0.1", _agreement)
LEAN = Claim("f32: temporaries at most 0.1 of x's bytes", _temporaries)
NOTHING_FAILED = Claim("nothing failed", _nothing_failed)
ON_A_CPU = (
    SAME,
    Claim(
        "f32: 3 times as fast as Equinox's layer, its faster mode", _faster(EQUINOX, 3.0), False
    ),
    Claim("f32: 1.3 times as fast as Flax, the faster of its two", _faster(FLAX, 1.3), False),
    Claim("f32: 1.4 times as fast as PyTorch", _faster((names.TORCH,), 1.4), False),
    Claim(
        "f32, 1 MiB or more: slower than no other on any shape",
        _at_most(PEERS, 1.0, _large),
        False,
    ),
    Claim(
        "f32, below 1 MiB: at most 1.1 of the fastest",
        _at_most(PEERS, 1.1, lambda row: not _large(row)),
        False,
    ),
    Claim(
        "f32, over 8 MiB: at most 1.15 of the sum of its parts",
        _at_most((PARTS,), 1.15, lambda row: row.bytes > 8 * MIB),
        False,
    ),
    LEAN,
    Claim(
        "bf16, 1 MiB or more: no slower than PyTorch",
        _at_most((names.TORCH,), 1.0, _large, "bf16"),
        False,
    ),
    Claim("one layer compiles no slower than Equinox's", _compiles("compile"), False),
    Claim("so does a stack of 50", _compiles("stack"), False),
    Claim("the cost grows linearly: exponent 0.9 to 1.1", _growth, False),
    Claim("the device-invariant mode: at most twice the time", _invariance, False),
    Claim("layer norm, f32: faster than Equinox's (geometric mean)", _layer_norm, False),
    NOTHING_FAILED,
)


# Claims on a GPU.


def _bits(rows: Rows) -> tuple[str, bool]:
    found = _measured(rows, "differing", "bits")
    worst = max(found, key=lambda row: row.differing)
    beside = f" ({worst.peer}, {worst.place})" if worst.differing else ""
    said = f"{worst.differing:g} of {worst.calls} runs differ{beside}; {len(found)} results"
    return said, not worst.differing


def _share(part: str, layout: str) -> Judge:
    def judged(rows: Rows) -> tuple[str, bool]:
        found = _measured(rows, "share", part, names.OURS)
        found = _some([row for row in found if row.layout == layout and row.bytes > LARGE])
        worst = min(found, key=lambda row: row.share)
        enough = sum(row.share >= SHARE for row in found)
        said = f"{enough} of {len(found)}; least {worst.share:.0%} ({worst.place})"
        return said, enough == len(found)

    return judged


def _equinox_on_average(rows: Rows) -> tuple[str, bool]:
    mean = 1 / geometric_mean(ratios(rows, (names.EQUINOX_BATCH,)))
    return f"{mean:.2f}", mean >= EQUINOX_FACTOR


def _equinox_everywhere(rows: Rows) -> tuple[str, bool]:
    slowest = max(ratios(rows, (names.EQUINOX_BATCH,)), key=lambda ratio: ratio.value)
    least = 1 / slowest.value
    return f"least {least:.2f} ({slowest.ours.place})", least >= EQUINOX_FACTOR


def _never_slower(found: Sequence[Ratio], beside: str = "") -> tuple[str, bool]:
    slower = [ratio for ratio in found if ratio.slower]
    worst = max(slower or found, key=lambda ratio: ratio.value)
    of_host = sum(ratio.ours.of_host for ratio in slower)
    waited = f", on {of_host} waiting for the host" if of_host else ""
    said = f"slower on {len(slower)} of {len(found)}{waited}; worst {worst}{beside}"
    return said, not slower


def _no_slower_than_torch(part: str) -> Judge:
    """Compares with the best of torch: where channels are last, in its faster format."""

    def judged(rows: Rows) -> tuple[str, bool]:
        timed = side_by_side(rows)
        found = []
        for (of_part, shape, dtype, layout, program), peers in timed.items():
            layouts = (FIRST, LAST) if layout == LAST else (layout,)
            keys = [(part, shape, dtype, each, program) for each in layouts]
            theirs = [timed[k][n] for k in keys for n in IN_TORCH if n in timed.get(k, {})]
            if of_part == part and names.OURS in peers and theirs:
                best = min(theirs, key=lambda row: row.median)
                mine = peers[names.OURS]
                found.append(Ratio(mine.median / best.median, mine, best))
        return _never_slower(_some(found))

    return judged


def _never_slower_than_xla(rows: Rows) -> tuple[str, bool]:
    found = []
    for part in ("time", "layer_norm", "training"):
        try:
            found += ratios(rows, (names.OURS_XLA,), part=part, program="")
        except NotMeasured:
            continue
    same = [r.value for r in found if not r.ours.note and r.ours.part != "training"]
    apart = max((max(value, 1 / value) for value in same), default=math.nan)
    return _never_slower(
        _some(found), f"; the same program twice: up to {apart:.2f}" if same else ""
    )


OVER = "over 100 MB: 85% of copy bandwidth"
OF_SPEED = (
    Claim(f"batch norm, {LAST}, {OVER}", _share("time", LAST)),
    Claim(f"batch norm, {FIRST}, {OVER}", _share("time", FIRST)),
    Claim(f"layer norm, {OVER}", _share("layer_norm", ROWS)),
    Claim(
        "1.5 times as fast as Equinox's batch norm, forward + backward, on average",
        _equinox_on_average,
    ),
    Claim("and so on every array", _equinox_everywhere),
    Claim("batch norm: no slower than PyTorch's best", _no_slower_than_torch("time")),
    Claim("layer norm: no slower than PyTorch's best", _no_slower_than_torch("layer_norm")),
    Claim(
        "never slower than XLA under 'auto', training steps included", _never_slower_than_xla
    ),
)
BITS_SAME = Claim("the same bits in every run, forward and backward", _bits)
ON_A_GPU = (BITS_SAME, SAME, *OF_SPEED, NOTHING_FAILED)


def verdicts(rows: Rows) -> list[Verdict]:
    """Judges the claims of the device that the rows are of, numbered."""
    device = rows[0].device if rows else "cpu"
    found = judge(ON_A_CPU if device == "cpu" else ON_A_GPU, rows)
    if device == "rehearsal":
        silent = {claim.text for claim in OF_SPEED}
        found = [
            v._replace(measured="says nothing on a CPU", holds=None) if v.claim in silent else v
            for v in found
        ]
    if device != "cpu":  # where a part was measured alone, --quick fails of nothing else
        found = [v._replace(quick=v.holds is not None) for v in found]
    return [v._replace(claim=f"{i}. {v.claim}") for i, v in enumerate(found, 1)]
