"""Judges the compiled programs: how many are as claimed, and which are not."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from experiments.lab.claims import Claim, NotMeasured
from experiments.lab.passes import BOTH, FORWARD, NO_NORM
from experiments.lab.peers import names

from .cases import DENSE, IMAGES
from .measured import Kernel, Program
from .programs import APART, BATCH_NORM, BETWEEN
from .recipe import ATOMIC, OURS, Step

# XLA's two-pass statistics move 9 units: x for the mean, x for the variance, x and y; then x
# and dy for the sums, x, dy and dx. The tenth of a unit is for partial sums.
MOST_XLA = 9.1
# Kernels read x once for the statistics; the least is 3 forward, 5 backward. Partial sums may
# come to 0.05 each; the vectors of parameters and state come to 0.01 of x with 1568 examples.
MOST = {FORWARD: 3.06, APART: 8.11}
KERNELS = (names.OURS_TRITON, names.OURS_MOSAIC)


class Measured(NamedTuple):
    programs: list[Program]
    kernels: list[Kernel]
    steps: list[Step]


Judge = Callable[[Measured], tuple[str, bool]]


def _judged(checked: Iterable[object], wrong: Iterable[object]) -> tuple[str, bool]:
    """Returns how many of those that were checked are as claimed, and which are not."""
    of, places = len(list(checked)), [str(place) for place in wrong]
    if not of:
        raise NotMeasured
    return ", ".join([f"{of - len(places)} of {of}", *places]), not places


def _place(row: Program | Kernel) -> str:
    what = row.kernel if isinstance(row, Kernel) else row.direction
    shape = "x".join(map(str, row.shape))
    return f"{row.device} {shape} {row.dtype} {row.implementation} {what}"


def _kernels(problem: str, implementation: str = "") -> Judge:
    def judge(measured: Measured) -> tuple[str, bool]:
        rows = [row for row in measured.kernels if implementation in row.implementation]
        return _judged(rows, (_place(row) for row in rows if problem in row.problem))

    return judge


def _moves(most: dict[str, float], chosen: Callable[[Program], bool]) -> Judge:
    """Judges whether the chosen programs move at most so many units, by direction."""

    def judge(measured: Measured) -> tuple[str, bool]:
        rows = [row for row in measured.programs if row.direction in most and chosen(row)]
        over = [row for row in rows if row.units is None or row.units > most[row.direction]]
        return _judged(rows, (f"{_place(row)}: {row.units}" for row in over))

    return judge


def _xla_norm(row: Program) -> bool:
    by_xla = (row.program, row.implementation) == (BATCH_NORM, names.OURS_XLA)
    return by_xla and row.shape in (DENSE, IMAGES)


def _norm_by_kernels(row: Program) -> bool:
    # Images in the caller's layout, with no convolution before, XLA first writes out in theirs.
    return row.program != BETWEEN and row.shape != IMAGES and row.implementation in KERNELS


def _between(*implementations: str) -> Judge:
    def judge(measured: Measured) -> tuple[str, bool]:
        changes = {
            (row.device, row.dtype, row.implementation): row.layout_changes or 0
            for row in measured.programs
            if row.program == BETWEEN
        }
        judged = [where for where in changes if where[2] in implementations]
        # There XLA leaves convolutions in the caller's layout, which kernels do not read.
        judged = [w for w in judged if w[2] == names.OURS_XLA or w[:2] != ("A100", "float32")]
        adds = (w for w in judged if changes[w] > changes[*w[:2], NO_NORM])
        return _judged(judged, map(" ".join, adds))

    return judge


def _recipe_adds(measured: Measured) -> tuple[str, bool]:
    wrong = [step.program for step in measured.steps if step.recipe == ATOMIC]
    return _judged(measured.steps, wrong)


def _recipe_keeps(measured: Measured) -> tuple[str, bool]:
    ours = [step for step in measured.steps if step.program in OURS]
    return _judged(ours, (step.program for step in ours if not step.same))


CLAIMS = [
    Claim(
        f"1. by XLA: at most {MOST_XLA} units of x, forward and backward at once",
        _moves({BOTH: MOST_XLA}, _xla_norm),
    ),
    Claim("2. by XLA: no layout changes added between convolutions", _between(names.OURS_XLA)),
    Claim(
        f"3. by kernels: at most {MOST[FORWARD]} units forward, {MOST[APART]} with backward",
        _moves(MOST, _norm_by_kernels),
    ),
    Claim("4. by kernels: no layout changes added between convolutions", _between(*KERNELS)),
    Claim("5. no kernel spills registers", _kernels("spills")),
    Claim("6. no kernel adds atomically", _kernels("atomics")),
    Claim("7. Triton's load x and g 16 bytes at a time", _kernels("loads", "triton")),
    Claim("8. Mosaic's have x and g copied ahead", _kernels("no copies", "mosaic")),
    Claim("9. and copy nothing to where it may be read", _kernels("unfenced", "mosaic")),
    Claim("10. the recipe leaves no scatter that adds atomically", _recipe_adds),
    Claim("11. the recipe changes no program of this package", _recipe_keeps),
]
