"""Judges what is claimed of this layer's speed, on a CPU and on a GPU."""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.lab.claims import Claim, NotMeasured, Verdict, worst
from experiments.lab.peers import names

from .cases import BOTH, EQUINOX, FIRST, FLAX, IN_TORCH, LARGE, LAST, MIB, ROWS
from .programs import SUM_OF_PARTS
from .rows import DIFFERS, Row, chosen, measured

Rows = Sequence[Row]
Judge = Callable[[Rows], tuple[str, bool]]

# Below so many values a call is mostly dispatch, whose cost does not grow.
GROWS_FROM = 2**18
BY_TWO, BY_THREE = "powers of 2", "powers of 3"

# On a GPU.
SHARE, EQUINOX_FACTOR = 0.85, 1.5
# Two timings of one program lie apart by a little, depending on where its arrays lie. What is
# slower by no more than this, or within the quartiles, is not called slower.
APART = 1.03


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
        return f"{self.value:.2f} of {self.other.peer} on {self.ours.where}"


VALUE = operator.attrgetter("value")


def ratios(
    rows: Rows, others: Sequence[str], *, of: str = "median", ours: str = names.OURS
) -> list[Ratio]:
    """Returns, array by array, our number over the least of the others'."""
    found = []
    known = measured(rows, of)
    for mine in chosen(known, peer=ours):
        theirs = [row for row in known if row.peer in others and _beside(mine, row)]
        if theirs:
            best = min(theirs, key=operator.attrgetter(of))
            found.append(Ratio(getattr(mine, of) / getattr(best, of), mine, best))
    return found


def _beside(mine: Row, other: Row) -> bool:
    """Returns whether both are of one array; where channels are last, torch may choose."""
    same = operator.attrgetter("part", "shape", "dtype", "program")
    chosen_by_torch = (mine.layout, other.layout) == (LAST, FIRST) and other.peer in IN_TORCH
    return same(mine) == same(other) and (mine.layout == other.layout or chosen_by_torch)


def _mean(found: Sequence[Ratio]) -> float:
    """Returns the geometric mean; without ratios, raises `NotMeasured`."""
    if not found:
        raise NotMeasured
    return math.exp(np.mean([math.log(ratio.value) for ratio in found]))


# Claims of a kind. Times are of forward + backward; of several others the best counts, array
# by array.


def _faster(others: Sequence[str], target: float, **fields: Any) -> Judge:
    """Judges how many times as fast it is, on the geometric mean over the arrays."""

    def judged(rows: Rows) -> tuple[str, bool]:
        timed = chosen(rows, part="time", program=BOTH, **fields)
        speed_up = 1 / _mean(ratios(timed, others))
        each = ((other, ratios(timed, (other,))) for other in others)
        said = ", ".join(f"{1 / _mean(found):.2f} x {other}" for other, found in each if found)
        beside = f" ({said})" if len(others) > 1 else ""
        return f"{speed_up:.2f} x{beside}", speed_up >= target

    return judged


def _at_most(
    target: float,
    others: Sequence[str],
    only: Callable[[Row], bool] = lambda row: True,
    **fields: Any,
) -> Judge:
    """Judges the largest ratio of times."""

    def judged(rows: Rows) -> tuple[str, bool]:
        timed = chosen(rows, part="time", program=BOTH, **fields)
        largest, ratio = worst(ratios(list(filter(only, timed)), others), VALUE)
        return str(ratio), largest <= target

    return judged


def _on_average(said: str, others: Sequence[str], part: str, of: str = "median") -> Judge:
    """Judges whether the geometric mean of the ratios is at most 1."""

    def judged(rows: Rows) -> tuple[str, bool]:
        found = ratios(chosen(rows, part=part, dtype="f32", program=BOTH), others, of=of)
        values, mean = [ratio.value for ratio in found], _mean(found)
        peers = " and ".join(sorted({ratio.other.peer for ratio in found}))
        form = {"mean": mean, "peers": peers, "least": min(values), "most": max(values)}
        return said.format(**form), mean <= 1

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


def _never_slower(others: Sequence[str], *parts: str) -> Judge:
    def judged(rows: Rows) -> tuple[str, bool]:
        found = ratios([row for row in rows if row.part in parts], others)
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


def _invariance(rows: Rows) -> tuple[str, bool]:
    timed = chosen(rows, part="time", program=BOTH)
    found = ratios(timed, (names.OURS,), ours=names.OURS_INVARIANT)
    largest, ratio = worst(found, VALUE)
    return f"{ratio} {ratio.ours.dtype}", largest <= 2


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


PEERS = (*EQUINOX, *FLAX, names.TORCH)
COMPILES = ("{mean:.2f} of {peers}", EQUINOX)
LAYER_NORM = "{mean:.2f} of its time ({least:.2f} to {most:.2f})"
OVER = "over 100 MB: 85% of copy bandwidth"
SAME = "all that is timed computes the same: f32 to 1e-4, bf16 to 0.1"

ON_A_CPU: dict[str, Judge] = {
    SAME: _agreement,
    "f32: 3 times as fast as Equinox's layer, its faster mode": _faster(
        EQUINOX, 3.0, dtype="f32"
    ),
    "f32: 1.3 times as fast as Flax, the faster of its two": _faster(FLAX, 1.3, dtype="f32"),
    "f32: 1.4 times as fast as PyTorch": _faster((names.TORCH,), 1.4, dtype="f32"),
    "f32, 1 MiB or more: slower than no other on any shape": _at_most(
        1.0, PEERS, lambda row: row.bytes >= MIB, dtype="f32"
    ),
    "f32, below 1 MiB: at most 1.1 of the fastest": _at_most(
        1.1, PEERS, lambda row: row.bytes < MIB, dtype="f32"
    ),
    "f32, over 8 MiB: at most 1.15 of the sum of its parts": _at_most(
        1.15, (SUM_OF_PARTS,), lambda row: row.bytes > 8 * MIB, dtype="f32"
    ),
    "f32: temporaries at most 0.1 of x's bytes": _temporaries,
    "bf16, 1 MiB or more: no slower than PyTorch": _at_most(
        1.0, (names.TORCH,), lambda row: row.bytes >= MIB, dtype="bf16"
    ),
    "one layer compiles no slower than Equinox's": _on_average(
        *COMPILES, "compile", "compile_seconds"
    ),
    "so does a stack of 50": _on_average(*COMPILES, "stack", "compile_seconds"),
    "the cost grows linearly: exponent 0.9 to 1.1": _growth,
    "the device-invariant mode: at most twice the time": _invariance,
    "layer norm, f32: faster than Equinox's (geometric mean)": _on_average(
        LAYER_NORM, (names.EQUINOX,), "layer_norm"
    ),
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
    "never slower than XLA under 'auto', training steps included": _never_slower(
        (names.OURS_XLA,), "time", "layer_norm", "training"
    ),
    "nothing failed": _nothing_failed,
}
# The others depend on the machine: --quick does not fail of them on a CPU, and a rehearsal says
# nothing of them.
ANYWHERE = (_agreement, _bits, _temporaries, _nothing_failed)


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
