"""What is claimed of this layer on a GPU, each with what was measured."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from . import gpu_run_accuracy
from .accuracy_claims import Verdict
from .benchmark_layers import BOTH
from .gpu_run_agreement import DIFFERS
from .gpu_run_contenders import AUTO, EQUINOX, XLA
from .gpu_run_job import FIRST, LARGE, LAST, ROWS
from .gpu_run_rows import AGREEMENT, BITS, LAYER_NORM, LAYERS, NOT_SERVED, TRAIN, Row
from .gpu_run_torch import COMPILED, TORCH

SHARE, EQUINOX_FACTOR = 0.85, 1.5
# Two timings of one program lie apart by a little, depending on where its arrays lie. What is
# slower by no more than this, or within the quartiles, is not called slower. How far apart
# "auto" and "xla" are where both are the same program is said beside it.
APART = 1.03

# Part, array, layout, dtype, program.
Key = tuple[str, str, str, str, str]
Timings = dict[Key, dict[str, Row]]


class Ratio(NamedTuple):
    """This layer's time over another's."""

    value: float
    slower: bool
    ours: Row
    other: Row

    def __str__(self) -> str:
        return f"{self.value:.2f} of {self.other.contender} ({place(self.ours)})"


def place(row: Row) -> str:
    words = (row.what, row.layout if row.layout != ROWS else "", row.dtype, row.program)
    return " ".join(filter(None, words))


def timings(rows: Iterable[Row]) -> Timings:
    """What was timed of all contenders, side by side."""
    found: Timings = defaultdict(dict)
    for row in rows:
        if not math.isnan(row.median):
            found[row.part, row.what, row.layout, row.dtype, row.program][row.contender] = row
    return dict(found)


def _ratio(ours: Row, other: Row) -> Ratio:
    value = ours.median / other.median
    return Ratio(value, value > APART and ours.low > other.high, ours, other)


def _against(
    found: Timings, others: Callable[[Key], Sequence[Row]], parts: Sequence[str]
) -> list[Ratio]:
    """Of "auto", to the fastest of the others; worst first."""
    ratios = []
    for key, contenders in found.items():
        if key[0] in parts and AUTO in contenders and others(key):
            best = min(others(key), key=lambda row: row.median)
            ratios.append(_ratio(contenders[AUTO], best))
    return sorted(ratios, key=lambda ratio: -ratio.value)


def _torch(found: Timings) -> Callable[[Key], list[Row]]:
    """Of torch: where the channels are last, in whichever format it is faster."""

    def rows(key: Key) -> list[Row]:
        part, what, layout, dtype, program = key
        layouts = (FIRST, LAST) if layout == LAST else (layout,)
        each = [found.get((part, what, other, dtype, program), {}) for other in layouts]
        return [c[name] for c in each for name in (TORCH, COMPILED) if name in c]

    return rows


def _named(found: Timings, name: str) -> Callable[[Key], list[Row]]:
    return lambda key: [found[key][name]] if name in found[key] else []


def _never_slower(claim: str, ratios: Sequence[Ratio], beside: str = "") -> Verdict:
    if not ratios:
        return Verdict(claim, "not run", None)
    slower = [ratio for ratio in ratios if ratio.slower]
    worst = max(slower or ratios, key=lambda ratio: ratio.value)
    of_host = sum(ratio.ours.of_host for ratio in slower)
    waited = f", on {of_host} waiting for the host" if of_host else ""
    said = f"slower on {len(slower)} of {len(ratios)}{waited}; worst {worst}{beside}"
    return Verdict(claim, said, not slower)


def _share(claim: str, found: Timings, part: str, layout: str) -> Verdict:
    claim = f"{claim}, over 100 MB: 85% of copy bandwidth"
    mine = (c for key, c in found.items() if (key[0], key[2]) == (part, layout))
    rows = [c[AUTO] for c in mine if AUTO in c and c[AUTO].bytes > LARGE]
    if not rows:
        return Verdict(claim, "not run", None)
    worst, enough = min(rows, key=lambda r: r.share), [r for r in rows if r.share >= SHARE]
    said = f"{len(enough)} of {len(rows)}; least {worst.share:.0%} ({place(worst)})"
    return Verdict(claim, said, len(enough) == len(rows))


def _equinox(found: Timings) -> list[Verdict]:
    claims = (
        "1.5 times as fast as Equinox's batch norm, forward + backward, on average",
        "and so on every array",
    )
    ratios = [
        r for r in _against(found, _named(found, EQUINOX), (LAYERS,)) if r.ours.program == BOTH
    ]
    if not ratios:
        return [Verdict(claim, "not run", None) for claim in claims]
    mean = math.exp(sum(-math.log(ratio.value) for ratio in ratios) / len(ratios))
    slowest = max(ratios, key=lambda ratio: ratio.value)
    least = 1 / slowest.value
    return [
        Verdict(claims[0], f"{mean:.2f}", mean >= EQUINOX_FACTOR),
        Verdict(
            claims[1], f"least {least:.2f} ({place(slowest.ours)})", least >= EQUINOX_FACTOR
        ),
    ]


def _accuracy(rows: Sequence[Row]) -> list[Verdict]:
    """One for each implementation, over all layouts."""
    found: dict[str, list[tuple[str, Verdict]]] = defaultdict(list)
    for (layout, name), judged in gpu_run_accuracy.judge(rows).items():
        found[name] += [(layout, verdict) for verdict in judged if verdict.holds is not None]
    verdicts = []
    for name, run in found.items():
        missed = [f"{layout}, {v.claim}: {v.measured}" for layout, v in run if not v.holds]
        said = "; ".join([f"{len(run) - len(missed)} of {len(run)}", *missed])
        verdicts.append(Verdict(f"accuracy, {name}: the bounds hold", said, not missed))
    return verdicts or [Verdict("accuracy: the bounds hold", "not run", None)]


def _bits(rows: Sequence[Row]) -> Verdict:
    claim = "the same bits in every run, forward and backward"
    found = [row for row in rows if row.part == BITS and not row.note]
    if not found:
        return Verdict(claim, "not run", None)
    worst = max(found, key=lambda row: row.value)
    where = f" ({worst.contender}, {place(worst)})" if worst.value else ""
    said = f"{worst.value:g} of {worst.calls} runs differ{where}; {len(found)} results"
    return Verdict(claim, said, not worst.value)


def _agreement(rows: Sequence[Row]) -> Verdict:
    claim = "all that is timed computes the same"
    found = [row for row in rows if row.part == AGREEMENT and not math.isnan(row.value)]
    if not found:
        return Verdict(claim, "not run", None)
    differ = [row for row in found if row.note == DIFFERS]
    worst = {d: max(r.value for r in found if r.dtype == d) for d in {r.dtype for r in found}}
    said = ", ".join(f"to {worst[dtype]:.1e} in {dtype}" for dtype in sorted(worst))
    return Verdict(
        claim, "; ".join([said, *(f"not {r.contender}" for r in differ)]), not differ
    )


def _all_there(rows: Sequence[Row]) -> Verdict:
    failed = [row for row in rows if row.failed]
    said = "; ".join(f"{r.contender}, {r.part} {place(r)}" for r in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    return Verdict("nothing failed", said + more if failed else f"{len(rows)} rows", not failed)


def _speed(found: Timings) -> list[Verdict]:
    auto = _against(found, _named(found, XLA), (LAYERS, LAYER_NORM, TRAIN))
    same = [r for r in auto if not r.ours.note and r.ours.part != TRAIN]
    apart = max((max(r.value, 1 / r.value) for r in same), default=math.nan)
    beside = f"; the same program twice: up to {apart:.2f}" if same else ""
    torch = _torch(found)
    return [
        _share(f"batch norm, {LAST}", found, LAYERS, LAST),
        _share(f"batch norm, {FIRST}", found, LAYERS, FIRST),
        _share("layer norm", found, LAYER_NORM, ROWS),
        *_equinox(found),
        _never_slower(
            "batch norm: no slower than PyTorch's best", _against(found, torch, (LAYERS,))
        ),
        _never_slower(
            "layer norm: no slower than PyTorch's best", _against(found, torch, (LAYER_NORM,))
        ),
        _never_slower(
            "never slower than XLA under 'auto', training steps included", auto, beside
        ),
    ]


def judge(rows: Sequence[Row], *, gpu: bool) -> list[Verdict]:
    """All claims, numbered; those on speed only where there was a GPU."""
    speed = _speed(timings(rows))
    if not gpu:
        speed = [v._replace(measured="says nothing on a CPU", holds=None) for v in speed]
    verdicts = [*_accuracy(rows), _bits(rows), _agreement(rows), *speed, _all_there(rows)]
    return [v._replace(claim=f"{i}. {v.claim}") for i, v in enumerate(verdicts, 1)]


def not_served(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """By contender, what a kernel that was asked for by name said it cannot do."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.note.startswith(NOT_SERVED):
            found[row.contender].append(row)
    return dict(found)
