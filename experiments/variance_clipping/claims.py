"""Judges what Caffe #3963 says of variance clipping, and what is found here.

`LEGEND` defines the failures, each in one run beside the clean run of the same layer and seed.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.lab import rows
from experiments.lab.claims import Claim, NotMeasured

from .runs import CLEAN, LOUD, MOMENTUM, ONE_IMAGE, RATIO, SCALED, START, WINDOW, Run, Setting

EXPLODED = 10.0
COLLAPSED = 0.5
FINE = 0.02
RUINED = 0.1

LEGEND = f"""\
A1: the largest gradient is more than {EXPLODED:g} times the clean run's.
A2: training accuracy is below {COLLAPSED:.0%} in the {WINDOW} steps after.
B: at the end, training accuracy is within {100 * FINE:g} points of the clean run's,
and test accuracy is {100 * RUINED:g} points or more below it.
A failure counts where most of the seeds have it."""


class Cell(NamedTuple):
    """Holds what the runs of a setting show beside the clean runs: medians over the seeds."""

    failures: list[str]  # A1, A2, B, and "ruined": B whatever training looks like
    points_lost_at_once: float  # of test accuracy, right after the last corrupted batch
    points_lost: float  # of test accuracy, at the end
    gradient_times: float  # the clean run's
    accuracy_after: float
    growth: float  # the largest of any seed
    test_end: NDArray[np.float64]  # seed by seed


Cells = dict[Setting, Cell]
Judge = Callable[[Cells], tuple[str, bool]]


def by_setting(found: Iterable[Run]) -> Cells:
    runs = rows.by(found, lambda run: Setting(*run[:3]))
    return {s: _cell(mine, runs[s._replace(corruption=CLEAN)]) for s, mine in runs.items()}


def _cell(runs: list[Run], clean_runs: list[Run]) -> Cell:
    run, clean = (
        np.rec.fromrecords(of_seeds, formats=None, names=Run._fields)
        for of_seeds in (runs, clean_runs)
    )
    # Written so that a NaN is a failure.
    ruined = ~(clean.test_end - run.test_end < RUINED)
    failures = {
        "A1": ~(run.gradient <= EXPLODED * clean.gradient),
        "A2": ~(run.accuracy_after >= COLLAPSED),
        "B": (run.accuracy_end >= clean.accuracy_end - FINE) & ruined,
        "ruined": ruined,
    }
    return Cell(
        failures=[name for name, of_seeds in failures.items() if of_seeds.mean() > 0.5],
        points_lost_at_once=np.median(100 * (clean.test_after - run.test_after)),
        points_lost=np.median(100 * (clean.test_end - run.test_end)),
        gradient_times=np.median(run.gradient / clean.gradient),
        accuracy_after=np.median(run.accuracy_after),
        growth=run.growth.max(),
        test_end=run.test_end,
    )


def both_ways(cells: Cells, *, clean: bool = False) -> dict[Setting, tuple[Cell, Cell]]:
    """Returns the cells without and with clipping of all corruptions, or of none."""
    found = {
        setting: (cell, cells[setting._replace(clipped=True)])
        for setting, cell in cells.items()
        if not setting.clipped and (setting.corruption == CLEAN) == clean
    }
    if not found:
        raise NotMeasured
    return found


def of_batch(cells: Cells, corruption: str) -> tuple[Cell, Cell]:
    """Returns the cells of `batch` without and with clipping."""
    return both_ways(cells)[Setting("batch", False, corruption)]


# What the thread says: how much of it holds is the question, and either answer is an answer.


def _happens(kind: str) -> Judge:
    """Judges whether there is a failure whose name starts so."""

    def judge(cells: Cells) -> tuple[str, bool]:
        plain = [cell for cell, _ in both_ways(cells).values()]
        found = sum(any(name.startswith(kind) for name in cell.failures) for cell in plain)
        return f"in {found} of {len(plain)} cells", found > 0

    return judge


def _prevented(failure: str, still: str) -> Judge:
    """Judges whether clipping turns every `failure` into a run that is not `still` one."""

    def judge(cells: Cells) -> tuple[str, bool]:
        failing = {
            s: c for s, (cell, c) in both_ways(cells).items() if failure in cell.failures
        }
        if not failing:
            raise NotMeasured
        prevented = [s for s, clipped in failing.items() if still not in clipped.failures]
        named = ", ".join(f"{s.approach} ({s.corruption})" for s in prevented)
        number = f"in {len(prevented)} of {len(failing)} cells"
        return f"{number}: {named}" if named else number, len(prevented) == len(failing)

    return judge


_SAYS = {
    "1. A happens without clipping: gradients explode or training collapses": _happens("A"),
    "2. B happens without clipping: training looks fine, inference is ruined": _happens("B"),
    "3. clipping prevents A1, that gradients explode": _prevented("A1", "A1"),
    "4. clipping prevents A2, that training collapses": _prevented("A2", "A2"),
    "5. clipping prevents B, that inference is ruined": _prevented("B", "ruined"),
}
THREAD = tuple(Claim(text, judge, quick=False) for text, judge in _SAYS.items())


# What is found here.


def _bounded(cells: Cells) -> tuple[str, bool]:
    without, with_ = (
        float(np.max([1.0, *(cell.growth for cell in column)]))
        for column in zip(*both_ways(cells).values(), strict=True)
    )
    # A clipped variance is at most c (g + mean g), 2 c times the mean of g in the mean over
    # channels, and has this share of the running average. The last term is rounding.
    share = (1 - MOMENTUM) / (1 - MOMENTUM**START)
    bound = 1 + (2 * RATIO - 1) * share + 1e-5
    measured = f"at most {with_:.3f} times in one step, without clipping {without:.3g}"
    return measured, with_ <= bound < without


POINTS = "points lost: without {0.points_lost:.1f}, with {1.points_lost:.1f}"
TIMES = "without {0.gradient_times:.1f}, with {1.gradient_times:.1f}"
ACCURACY = "without {0.accuracy_after:.1%}, with {1.accuracy_after:.1%}"


# In this network. In the stability experiment's two, 20 and 35 points are lost with clipping:
# what the image's gradients do to the weights lasts longer there.
def _one_image(cells: Cells) -> tuple[str, bool]:
    plain, clipped = of_batch(cells, ONE_IMAGE)
    holds = "B" in plain.failures and "ruined" not in clipped.failures
    return POINTS.format(plain, clipped), holds


def _price(cells: Cells) -> tuple[str, bool]:
    plain, clipped = of_batch(cells, SCALED)
    times, accuracy = (said.format(plain, clipped) for said in (TIMES, ACCURACY))
    return (
        f"gradient, times the clean run's: {times}; "
        f"training accuracy {WINDOW} steps after: {accuracy}"
    ), "A1" in clipped.failures and "A1" not in plain.failures


def _mean(cells: Cells) -> tuple[str, bool]:
    both = of_batch(cells, LOUD)
    return POINTS.format(*both), all("B" in cell.failures for cell in both)


def _clean(cells: Cells) -> tuple[str, bool]:
    pairs = both_ways(cells, clean=True).values()
    most = max(100 * np.abs(c.test_end - plain.test_end).max() for plain, c in pairs)
    return f"test accuracy changes by {most:.1f} points at most", most <= 1


FOUND = (
    Claim("6. clipping keeps the running variance from jumping", _bounded),
    Claim("7. clipping prevents B in batch after one corrupted image a batch", _one_image),
    Claim("8. the price: batch, scaled by 1e3, has A1 with clipping only", _price),
    Claim("9. the mean is not clipped: batch, constant 1e3, has B either way", _mean),
    Claim("10. clipping leaves clean training as it is, to a point", _clean),
)
