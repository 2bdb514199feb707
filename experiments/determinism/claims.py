"""Judges what is claimed of runs that are to agree, and of what probes cost."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.lab.claims import Claim, NotMeasured
from experiments.lab.rows import by

from .overhead import RETURNED, Overhead
from .run import FLIPPED
from .runs import DEVICES, FAULT, NO_SEED, ON_TWO, RECIPE, SEED, Result

# Of a step with fingerprints among its outputs, in the network that is trained here; the large
# one is beside it. What a ledger or a callback costs is said, not limited.
MOST, EXAMPLE = 1.05, "small"


class Measured(NamedTuple):
    results: list[Result]
    overhead: list[Overhead]


def by_setting(found: Sequence[Result]) -> dict[str, list[Result]]:
    return by(found, lambda row: row.setting)


def described(rows: Sequence[Result]) -> str:
    number = _different(rows)
    return f"{len(rows)} runs, {'the same bits' if number == 1 else f'{number} sets of bits'}"


def parting(rows: Sequence[Result]) -> str:
    """Returns where they part from the first, the earliest in the program first."""
    parts = sorted((row.agreed, row.parts) for row in rows if row.parts)
    return ", ".join(dict.fromkeys(text for _, text in parts))


def _different(rows: Sequence[Result]) -> int:
    """Returns how many sets of bits there are in the last step."""
    return len({(row.fingerprint, row.final_loss, row.by_step[-1]) for row in rows})


def _same(rows: list[Result]) -> bool:
    return _different(rows) == 1


def _all_differ(rows: list[Result]) -> bool:
    return _different(rows) == len(rows)


def _found(rows: list[Result]) -> bool:
    *_, last = rows
    step = last.run.removeprefix("before ")
    return last.parts == f"{step}: `weights.{FLIPPED}` forward"


def _of(
    setting: str, holds: Callable[[list[Result]], bool]
) -> Callable[[Measured], tuple[str, bool]]:
    def judge(measured: Measured) -> tuple[str, bool]:
        rows = by_setting(measured.results).get(setting)
        if rows is None:
            raise NotMeasured
        found = "; ".join(filter(None, (described(rows), parting(rows))))
        return found, holds(rows)

    return judge


def _overhead(measured: Measured) -> tuple[str, bool]:
    for row in measured.overhead:
        if (row.network, row.transport) == (EXAMPLE, RETURNED):
            return f"{row.median:.3f} ({row.low:.3f} to {row.high:.3f})", row.median <= MOST
    raise NotMeasured


CLAIMS = [
    Claim("1. without a seed every run is another", _of(NO_SEED, _all_differ)),
    Claim("2. with a seed, on one machine: the same bits", _of(SEED, _same), quick=False),
    Claim("3. with the recipe, on all cores and on one: the same bits", _of(RECIPE, _same)),
    Claim("4. with the recipe, on 2 devices: the same bits", _of(ON_TWO, _same), quick=False),
    Claim("5. on other numbers of devices: other bits", _of(DEVICES, _all_differ), quick=False),
    Claim(f"6. one bit of {FLIPPED} flipped before a step: found in it", _of(FAULT, _found)),
    Claim(
        f"7. a step with all probes takes at most {MOST} of the time without",
        _overhead,
        quick=False,
    ),
]
