"""Judges what Caffe #3963 says of variance clipping, and what is found here.

`LEGEND` defines the failures, each in one run beside the clean run of the same layer and seed.
"""

from collections.abc import Callable, Iterable

import numpy as np

from experiments.lab import rows
from experiments.lab.claims import Claim, NotMeasured

from .corruptions import CLEAN, LOUD, ONE_IMAGE, SCALED
from .runs import MOMENTUM, RATIO, START, WINDOW, Run, Setting

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

Runs = dict[Setting, list[Run]]  # seed by seed
Failure = Callable[[Run, Run], bool]  # takes a run, and the clean run beside it
Quantity = Callable[[Run, Run], float]
Judge = Callable[[Runs], tuple[str, bool]]


def by_setting(found: Iterable[Run]) -> Runs:
    return rows.by(found, lambda run: Setting(run.approach, run.clipped, run.corruption))


# Written so that a NaN is a failure.
def exploded(run: Run, clean: Run) -> bool:
    return not run.gradient <= EXPLODED * clean.gradient


def collapsed(run: Run, clean: Run) -> bool:
    return not run.accuracy_after >= COLLAPSED


def ruined(run: Run, clean: Run) -> bool:
    """Returns whether inference is ruined, whatever training looks like."""
    return not clean.test_end - run.test_end < RUINED


def silently_ruined(run: Run, clean: Run) -> bool:
    return run.accuracy_end >= clean.accuracy_end - FINE and ruined(run, clean)


FAILURES: dict[str, Failure] = {"A1": exploded, "A2": collapsed, "B": silently_ruined}


def points_lost(run: Run, clean: Run) -> float:
    """Returns by how much test accuracy at the end is lower."""
    return 100 * (clean.test_end - run.test_end)


def points_lost_at_once(run: Run, clean: Run) -> float:
    """Returns by how much test accuracy right after the last corrupted batch is lower."""
    return 100 * (clean.test_after - run.test_after)


def gradient_times(run: Run, clean: Run) -> float:
    return run.gradient / clean.gradient


def accuracy_after(run: Run, clean: Run) -> float:
    return run.accuracy_after


def pairs(runs: Runs, setting: Setting) -> list[tuple[Run, Run]]:
    """Returns, seed by seed, the run and the clean run beside it."""
    clean = setting._replace(corruption=CLEAN)
    if setting not in runs or clean not in runs:
        raise NotMeasured
    return list(zip(runs[setting], runs[clean], strict=True))


def seen(runs: Runs, setting: Setting, failure: Failure) -> bool:
    found = [failure(run, clean) for run, clean in pairs(runs, setting)]
    return sum(found) > len(found) / 2


def median(runs: Runs, setting: Setting, quantity: Quantity) -> float:
    return float(np.median([quantity(run, clean) for run, clean in pairs(runs, setting)]))


def _clipped(setting: Setting) -> Setting:
    return setting._replace(clipped=True)


def _cells(runs: Runs, *, clean: bool = False) -> list[Setting]:
    """Returns what was run both ways, without clipping: corrupted, or clean."""
    cells = [s for s in runs if not s.clipped and (s.corruption == CLEAN) == clean]
    cells = [s for s in cells if _clipped(s) in runs]
    if not cells:
        raise NotMeasured
    return cells


# What the thread says: how much of it holds is the question, and either answer is an answer.


def _happens(*failures: Failure) -> Judge:
    def judge(runs: Runs) -> tuple[str, bool]:
        cells = _cells(runs)
        found = [s for s in cells if any(seen(runs, s, failure) for failure in failures)]
        return f"in {len(found)} of {len(cells)} cells", bool(found)

    return judge


def _prevented(failure: Failure, still: Failure) -> Judge:
    """Judges whether clipping turns every `failure` into a run that is not `still` one."""

    def judge(runs: Runs) -> tuple[str, bool]:
        failing = [s for s in _cells(runs) if seen(runs, s, failure)]
        if not failing:
            raise NotMeasured
        prevented = [s for s in failing if not seen(runs, _clipped(s), still)]
        named = ", ".join(f"{s.approach} ({s.corruption})" for s in prevented)
        number = f"in {len(prevented)} of {len(failing)} cells"
        return f"{number}: {named}" if named else number, len(prevented) == len(failing)

    return judge


_SAYS = {
    "1. A happens without clipping: gradients explode or training collapses": _happens(
        exploded, collapsed
    ),
    "2. B happens without clipping: training looks fine, inference is ruined": _happens(
        silently_ruined
    ),
    "3. clipping prevents A1, that gradients explode": _prevented(exploded, exploded),
    "4. clipping prevents A2, that training collapses": _prevented(collapsed, collapsed),
    "5. clipping prevents B, that inference is ruined": _prevented(silently_ruined, ruined),
}
THREAD = tuple(Claim(text, judge, quick=False) for text, judge in _SAYS.items())


# What is found here.


def _bounded(runs: Runs) -> tuple[str, bool]:
    cells = _cells(runs)
    without, with_ = (
        float(np.max([1.0, *(run.growth for s in settings for run in runs[s])]))
        for settings in (cells, map(_clipped, cells))
    )
    # A clipped variance is at most c (g + mean g), 2 c times the mean of g in the mean over
    # channels, and has this share of the running average. The last term is rounding.
    share = (1 - MOMENTUM) / (1 - MOMENTUM**START)
    bound = 1 + (2 * RATIO - 1) * share + 1e-5
    measured = f"at most {with_:.3f} times in one step, without clipping {without:.3g}"
    return measured, with_ <= bound < without


def both(corruption: str) -> tuple[Setting, Setting]:
    """Returns `batch` without and with clipping."""
    without = Setting("batch", False, corruption)
    return without, _clipped(without)


def _said(runs: Runs, corruption: str, quantity: Quantity, form: str) -> str:
    without, with_ = (format(median(runs, s, quantity), form) for s in both(corruption))
    return f"without {without}, with {with_}"


# In this network, not in the stability experiment's two (`--network`), which lose 20 and 35
# points with clipping: what the image's gradients do to the weights lasts longer there.
def _one_image(runs: Runs) -> tuple[str, bool]:
    without, with_ = both(ONE_IMAGE)
    holds = seen(runs, without, silently_ruined) and not seen(runs, with_, ruined)
    return f"points lost: {_said(runs, ONE_IMAGE, points_lost, '.1f')}", holds


def _price(runs: Runs) -> tuple[str, bool]:
    without, with_ = both(SCALED)
    measured = (
        f"gradient, times the clean run's: {_said(runs, SCALED, gradient_times, '.1f')}; "
        f"training accuracy {WINDOW} steps after: {_said(runs, SCALED, accuracy_after, '.1%')}"
    )
    return measured, seen(runs, with_, exploded) and not seen(runs, without, exploded)


def _mean(runs: Runs) -> tuple[str, bool]:
    holds = all(seen(runs, setting, silently_ruined) for setting in both(LOUD))
    return f"points lost: {_said(runs, LOUD, points_lost, '.1f')}", holds


def _clean(runs: Runs) -> tuple[str, bool]:
    changes = [
        100 * abs(with_.test_end - without.test_end)
        for setting in _cells(runs, clean=True)
        for without, with_ in zip(runs[setting], runs[_clipped(setting)], strict=True)
    ]
    return f"test accuracy changes by {max(changes):.1f} points at most", max(changes) <= 1


FOUND = (
    Claim("6. clipping keeps the running variance from jumping", _bounded),
    Claim("7. clipping prevents B in batch after one corrupted image a batch", _one_image),
    Claim("8. the price: batch, scaled by 1e3, has A1 with clipping only", _price),
    Claim("9. the mean is not clipped: batch, constant 1e3, has B either way", _mean),
    Claim("10. clipping leaves clean training as it is, to a point", _clean),
)
