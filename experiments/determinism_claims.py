"""What the determinism experiment claims, each with what was measured."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import determinism_overhead
from .determinism_overhead import Overhead
from .determinism_run import FLIPPED
from .determinism_runs import Result
from .determinism_settings import (
    DEVICES,
    FAULT,
    INVARIANT,
    NO_SEED,
    ON_TWO,
    RECIPE,
    SEED,
)

# What the layer gives forwards; backwards, to the layer before it; and to its own weights.
NORM = (
    "`norm` forward",
    "`linear1` cotangent",
    "`weights.norm.weight` cotangent",
    "`weights.norm.bias` cotangent",
)


# What is timed is claimed of the network that is trained here; the large one is beside it.
EXAMPLE = "small"


class Verdict(NamedTuple):
    claim: str
    measured: str
    holds: bool | None  # None: it was not measured


def judge(
    found: Sequence[Result],
    probes: Sequence[str],
    flipped_at: int,
    overhead: Sequence[Overhead] = (),
) -> list[Verdict]:
    """`probes` are the names of `Result.by_probe`."""
    rows = by_setting(found)

    def same(claim: str, setting: str) -> Verdict:
        return _judged(claim, rows.get(setting), lambda of: different(of) == 1)

    def all_differ(claim: str, setting: str) -> Verdict:
        return _judged(claim, rows.get(setting), lambda of: different(of) == len(of))

    return [
        all_differ("1. without a seed every run is another", NO_SEED),
        same("2. with a seed, on one machine: the same bits", SEED),
        same("3. with the recipe, on all cores and on one: the same bits", RECIPE),
        same("4. with the recipe, on 2 devices: the same bits", ON_TWO),
        all_differ("5. on other numbers of devices: other bits", DEVICES),
        _judged(
            "6. ... but of device_invariant, whose output and gradients are the same bits",
            rows.get(INVARIANT),
            lambda of: not any(row.by_probe[probes.index(name)] for row in of for name in NORM),
        ),
        _judged(
            f"7. one bit of {FLIPPED} flipped before step {flipped_at}: found there",
            rows.get(FAULT),
            lambda of: of[-1].parts == f"step {flipped_at}: `weights.{FLIPPED}` forward",
        ),
        _overhead(overhead),
    ]


def by_setting(found: Sequence[Result]) -> dict[str, list[Result]]:
    settings: dict[str, list[Result]] = {}
    for row in found:
        settings.setdefault(row.setting, []).append(row)
    return settings


def different(rows: Sequence[Result]) -> int:
    """How many sets of bits there are in the last step."""
    return len({(row.fingerprint, row.final_loss, row.by_step[-1]) for row in rows})


def described(rows: Sequence[Result]) -> str:
    number = different(rows)
    return f"{len(rows)} runs, {'the same bits' if number == 1 else f'{number} sets of bits'}"


def parting(rows: Sequence[Result]) -> str:
    """Where they part from the first, the earliest in the program first."""
    parts = sorted((row.agreed, row.parts) for row in rows if row.parts)
    return ", ".join(dict.fromkeys(text for _, text in parts))


def _judged(
    claim: str, rows: list[Result] | None, holds: Callable[[list[Result]], bool]
) -> Verdict:
    if not rows:
        return Verdict(claim, "", None)
    measured = "; ".join(text for text in (described(rows), parting(rows)) if text)
    return Verdict(claim, measured, holds(rows))


def _overhead(rows: Sequence[Overhead]) -> Verdict:
    limit = determinism_overhead.CLAIMED
    claim = f"8. a step with all probes takes at most {limit} of the time without"
    kind = (EXAMPLE, determinism_overhead.RETURNED)
    outputs = [row for row in rows if (row.network, row.transport) == kind]
    if not outputs:
        return Verdict(claim, "", None)
    texts = (f"{row.median:.3f} ({row.low:.3f} to {row.high:.3f})" for row in outputs)
    return Verdict(claim, ", ".join(texts), all(row.median <= limit for row in outputs))
