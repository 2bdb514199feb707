"""Judges the compiled programs: how many are as claimed, and which are not."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from experiments.lab.claims import Claim, NotMeasured
from experiments.lab.passes import BOTH, FORWARD, NO_NORM
from experiments.lab.peers import names

from .cases import ALONE, BETWEEN, IMAGES
from .devices import COUNT, JIT, SHAPE, Sent
from .measured import Kernel, Program
from .memory import Needed
from .recipe import ATOMIC, OURS, Step

# XLA moves 8 units: x for the mean, x for the variance; x, dy and y with the sums of the
# backward pass; x, dy and dx. The fifth of a unit is for partial sums.
MOST_XLA = 8.2
# The kernel reads x once for the statistics, but columns only: an image in the caller's layout,
# with no convolution before, XLA first writes out.
MOST_PALLAS, MOST_IMAGES = MOST_XLA - 1, MOST_XLA + 1
# The least is 3 forward. Partial sums may come to 0.05, the vectors of parameters and state
# to 0.01 of x with 1568 examples.
MOST_FORWARD = 3.06


class Measured(NamedTuple):
    programs: list[Program]
    kernels: list[Kernel]
    steps: list[Step]
    sent: list[Sent]
    needed: list[Needed]


# Returns what a claim is about, and of each whether it is as claimed.
Check = Callable[[Measured], list[tuple[Any, bool]]]


def _claim(text: str, check: Check) -> Claim:
    def judge(measured: Measured) -> tuple[str, bool]:
        checked = check(measured)
        if not checked:
            raise NotMeasured
        wrong = [_place(row) for row, holds in checked if not holds]
        count = f"{len(checked) - len(wrong)} of {len(checked)}"
        return ", ".join([count, *wrong]), not wrong

    return Claim(text, judge)


def _place(row: Program | Kernel | Step | Sent | Needed) -> str:
    if isinstance(row, Needed):
        needed = f"{row.temporaries / 1e6:.0f} MB of temporaries"
        return f"{row.dtype}: {needed}" if row.recomputes else f"{row.dtype}: {row.seconds} s"
    if isinstance(row, Sent):
        return f"{row.way}, {row.layer}, {row.dtype}, masked {row.masked}: {row.collectives}"
    if isinstance(row, Step):
        return row.program
    array = f"{row.device} {'x'.join(map(str, row.shape))} {row.dtype}"
    if isinstance(row, Kernel):
        return f"{array} {row.kernel}"
    what = f"{row.direction}: {row.units} units, {row.layout_changes} layout changes"
    return f"{array} {row.program}, {row.implementation}, {what}"


def _moves(
    most: dict[str, float],
    name: str,
    chosen: Callable[[tuple[int, ...]], bool] = lambda shape: True,
) -> Check:
    """Checks that a norm alone moves at most so many units, by direction, of such shapes."""
    return lambda measured: [
        (row, row.units is not None and row.units <= most[row.direction])
        for row in measured.programs
        if row.program in ALONE and row.implementation == name
        if row.direction in most and chosen(row.shape)
    ]


def _between(name: str) -> Check:
    """Checks that a norm adds no layout changes to those of the convolutions alone."""

    def check(measured: Measured) -> list[tuple[Any, bool]]:
        rows = [row for row in measured.programs if row.program == BETWEEN]
        changes = {(r.device, r.dtype, r.implementation): r.layout_changes or 0 for r in rows}
        return [
            (row, changes[place] <= changes[*place[:2], NO_NORM])
            for row, place in zip(rows, changes, strict=True)
            if row.implementation == name
        ]

    return check


def _kernels(problem: str) -> Check:
    return lambda measured: [(row, problem not in row.problem) for row in measured.kernels]


def _together(measured: Measured) -> list[tuple[Any, bool]]:
    theirs = {row.dtype: row.sends for row in measured.sent if row.layer != names.OURS}
    return [
        (row, row.sends <= (theirs[row.dtype] if row.way == JIT else 2))
        for row in measured.sent
        if row.layer == names.OURS
    ]


# A whole ResNet-50; a short one has other shares.
BLOCKS = 16
# Times those with Equinox's layer, to lower and compile it.
MOST_SECONDS = 1.2


def _needs(field: str, of_ours: float, of_theirs: float = math.inf) -> Check:
    """Checks what is needed where outputs are computed again, as a share of the others'."""

    def check(measured: Measured) -> list[tuple[Any, bool]]:
        whole = [row for row in measured.needed if row.blocks == BLOCKS]
        most = {names.OURS: of_ours, names.EQUINOX_BATCH: of_theirs}
        return [
            (
                row,
                all(
                    getattr(row, field) <= most[other.layer] * getattr(other, field)
                    for other in whole
                    if other.dtype == row.dtype and not other.recomputes
                ),
            )
            for row in whole
            if row.recomputes
        ]

    return check


def _compiles(measured: Measured) -> list[tuple[Any, bool]]:
    whole = [row for row in measured.needed if row.blocks == BLOCKS and not row.recomputes]
    theirs = {row.dtype: row.seconds for row in whole if row.layer != names.OURS}
    ours = (row for row in whole if row.layer == names.OURS)
    return [(row, row.seconds <= MOST_SECONDS * theirs[row.dtype]) for row in ours]


CLAIMS = [
    _claim(
        f"1. by XLA: at most {MOST_XLA} units of x, forward and backward at once",
        _moves({BOTH: MOST_XLA}, names.OURS_XLA),
    ),
    _claim("2. by XLA: no layout changes added between convolutions", _between(names.OURS_XLA)),
    _claim(
        f"3. by pallas: at most {MOST_PALLAS:.1f}, of columns",
        _moves({BOTH: MOST_PALLAS}, names.OURS_PALLAS, lambda shape: shape != IMAGES),
    ),
    _claim(
        f"4. ... and {MOST_IMAGES:.1f} of images, which are first written out in columns",
        _moves({BOTH: MOST_IMAGES}, names.OURS_PALLAS, lambda shape: shape == IMAGES),
    ),
    _claim(
        f"5. ... and {MOST_FORWARD} forward, of columns of any number of rows",
        _moves({FORWARD: MOST_FORWARD}, names.OURS_PALLAS, lambda shape: shape != IMAGES),
    ),
    _claim(
        "6. by pallas: no layout changes added between convolutions",
        _between(names.OURS_PALLAS),
    ),
    _claim("7. no kernel spills registers", _kernels("spills")),
    _claim("8. no kernel adds atomically", _kernels("atomics")),
    _claim("9. all have what they read copied ahead", _kernels("no copies")),
    _claim("10. and copy nothing to where it may be read", _kernels("unfenced")),
    _claim(
        "11. the recipe leaves no scatter that adds atomically",
        lambda measured: [(step, step.recipe != ATOMIC) for step in measured.steps],
    ),
    _claim(
        "12. the recipe changes no program of this package",
        lambda measured: [(step, step.same) for step in measured.steps if step.program in OURS],
    ),
    _claim(
        f"13. over {COUNT} devices a step sends vectors alone",
        lambda measured: [
            (row, row.largest <= 4 * COUNT * SHAPE[1])
            for row in measured.sent
            if row.layer == names.OURS
        ],
    ),
    _claim("14. ... at most 2 in shard_map; by jit as few as Equinox's layer", _together),
    _claim(
        "15. recompute_outputs, ResNet-50: JAX keeps 0.6 of the bytes, 0.35 of Equinox's",
        _needs("kept", 0.6, 0.35),
    ),
    _claim(
        "16. XLA's temporaries are 0.6 of those without, 0.35 of Equinox's",
        _needs("temporaries", 0.6, 0.35),
    ),
    _claim("17. it moves at most 1.15 times the bytes", _needs("moved", 1.15)),
    _claim(
        f"18. ResNet-50, lower and compile: at most {MOST_SECONDS} of Equinox's time", _compiles
    ),
]
