"""What Caffe #3963 says of variance clipping, and what is found here: numbers and verdicts.

The failures, each in one run beside the clean run of the same layer and seed:

    A1  gradients explode: the largest norm of any gradient, from the first corrupted batch on,
        is more than 10 times the clean run's
    A2  training collapses: the accuracy of the clean batches in the 20 steps after the last
        corrupted one is below 50%
    B   training looks fine, inference is ruined: at the end, training accuracy is within 2
        points of the clean run's, and test accuracy is 10 points or more below it

A failure is seen where it is seen in more than half of the seeds.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .variance_clipping_corruptions import CLEAN, LOUD, ONE_IMAGE, SCALED
from .variance_clipping_runs import MOMENTUM, RATIO, START, WINDOW, Run, Runs, Setting

EXPLODED = 10.0
COLLAPSED = 0.5
FINE = 0.02
RUINED = 0.1

# Of a run, and the clean run beside it.
Failure = Callable[[Run, Run], bool]
Quantity = Callable[[Run, Run], float]


# Written so that a NaN is a failure.
def exploded(run: Run, clean: Run) -> bool:
    return not run.gradient <= EXPLODED * clean.gradient


def collapsed(run: Run, clean: Run) -> bool:
    return not run.accuracy_after >= COLLAPSED


def ruined(run: Run, clean: Run) -> bool:
    """Inference, whatever training looks like."""
    return not clean.test_end - run.test_end < RUINED


def silently_ruined(run: Run, clean: Run) -> bool:
    return run.accuracy_end >= clean.accuracy_end - FINE and ruined(run, clean)


FAILURES: dict[str, Failure] = {"A1": exploded, "A2": collapsed, "B": silently_ruined}


class Verdict(NamedTuple):
    claim: str
    measured: str
    holds: bool | None  # None: nothing was run to judge it by


class _NotRunError(Exception):
    pass


Claim = Callable[[Runs], tuple[str, bool]]


def pairs(runs: Runs, setting: Setting) -> list[tuple[Run, Run]]:
    """Of each seed, the run and the clean run beside it."""
    clean = setting._replace(corruption=CLEAN)
    if setting not in runs or clean not in runs:
        raise _NotRunError
    return [(run, runs[clean][seed]) for seed, run in runs[setting].items()]


def seen(runs: Runs, setting: Setting, failure: Failure) -> bool:
    found = [failure(run, clean) for run, clean in pairs(runs, setting)]
    return sum(found) > len(found) / 2


def median(runs: Runs, setting: Setting, of: Quantity) -> float:
    return float(np.median([of(run, clean) for run, clean in pairs(runs, setting)]))


def lost(run: Run, clean: Run) -> float:
    """Test accuracy at the end, in points."""
    return 100 * (clean.test_end - run.test_end)


def lost_at_once(run: Run, clean: Run) -> float:
    """The same right after the last corrupted batch."""
    return 100 * (clean.test_after - run.test_after)


def gradient(run: Run, clean: Run) -> float:
    """The largest, times the clean run's."""
    return run.gradient / clean.gradient


def accuracy_after(run: Run, clean: Run) -> float:
    return run.accuracy_after


def _clipped(setting: Setting) -> Setting:
    return setting._replace(clipped=True)


def _cells(runs: Runs) -> list[Setting]:
    """Every approach and corruption that was run both ways, without clipping."""
    cells = [s for s in runs if not s.clipped and s.corruption != CLEAN]
    cells = [s for s in cells if _clipped(s) in runs]
    if not cells:
        raise _NotRunError
    return cells


# What the thread says: how much of it holds is the question, and either answer is an answer.


def _happens(*names: str) -> Claim:
    def measure(runs: Runs) -> tuple[str, bool]:
        cells = _cells(runs)
        found = [s for s in cells if any(seen(runs, s, FAILURES[name]) for name in names)]
        return f"in {len(found)} of {len(cells)} cells", bool(found)

    return measure


def _prevented(name: str, still: Failure) -> Claim:
    def measure(runs: Runs) -> tuple[str, bool]:
        failing = [s for s in _cells(runs) if seen(runs, s, FAILURES[name])]
        if not failing:
            raise _NotRunError
        prevented = [s for s in failing if not seen(runs, _clipped(s), still)]
        named = ", ".join(f"{s.approach} ({s.corruption})" for s in prevented)
        number = f"in {len(prevented)} of {len(failing)} cells"
        return f"{number}: {named}" if named else number, len(prevented) == len(failing)

    return measure


THREAD: dict[str, Claim] = {
    "1. A happens without clipping: gradients explode or training collapses": _happens(
        "A1", "A2"
    ),
    "2. B happens without clipping: training looks fine, inference is ruined": _happens("B"),
    "3. clipping prevents A1, that gradients explode": _prevented("A1", exploded),
    "4. clipping prevents A2, that training collapses": _prevented("A2", collapsed),
    "5. clipping prevents B, that inference is ruined": _prevented("B", ruined),
}


# What is found here.


def _bounded(runs: Runs) -> tuple[str, bool]:
    growth = {False: [1.0], True: [1.0]}
    for setting in (s for cell in _cells(runs) for s in (cell, _clipped(cell))):
        growth[setting.clipped] += [run.growth for run in runs[setting].values()]
    # A clipped variance is at most c (g + mean g), 2 c times the mean of g in the mean over
    # channels, and has this share of the running average. The last term is rounding.
    share = (1 - MOMENTUM) / (1 - MOMENTUM**START)
    bound = 1 + (2 * RATIO - 1) * share + 1e-5
    without, with_ = (float(np.max(growth[flag])) for flag in (False, True))
    measured = f"at most {with_:.3f} times in one step, without clipping {without:.3g}"
    return measured, with_ <= bound < without


def _batch(corruption: str) -> tuple[Setting, Setting]:
    without = Setting("batch", False, corruption)
    return without, _clipped(without)


def _both(runs: Runs, settings: tuple[Setting, Setting], of: Quantity, form: str) -> str:
    without, with_ = (format(median(runs, setting, of), form) for setting in settings)
    return f"without {without}, with {with_}"


# In this network, not in the stability experiment's two (`--network`), which lose 20 and 35
# points with clipping: what the image's gradients do to the weights lasts longer there.
def _one_image(runs: Runs) -> tuple[str, bool]:
    without, with_ = both = _batch(ONE_IMAGE)
    measured = f"points lost: {_both(runs, both, lost, '.1f')}"
    return measured, seen(runs, without, silently_ruined) and not seen(runs, with_, ruined)


def _price(runs: Runs) -> tuple[str, bool]:
    without, with_ = both = _batch(SCALED)
    measured = (
        f"gradient, times the clean run's: {_both(runs, both, gradient, '.1f')}; training "
        f"accuracy {WINDOW} steps after: {_both(runs, both, accuracy_after, '.1%')}"
    )
    return measured, seen(runs, with_, exploded) and not seen(runs, without, exploded)


def _mean(runs: Runs) -> tuple[str, bool]:
    both = _batch(LOUD)
    measured = f"points lost: {_both(runs, both, lost, '.1f')}"
    return measured, all(seen(runs, setting, silently_ruined) for setting in both)


def _clean(runs: Runs) -> tuple[str, bool]:
    settings = [s for s in runs if not s.clipped and s.corruption == CLEAN]
    both = [(runs[s], runs[_clipped(s)]) for s in settings if _clipped(s) in runs]
    if not both:
        raise _NotRunError
    points = [
        100 * abs(with_[seed].test_end - run.test_end)
        for without, with_ in both
        for seed, run in without.items()
    ]
    return f"test accuracy changes by {max(points):.1f} points at most", max(points) <= 1


FOUND: dict[str, Claim] = {
    "6. clipping keeps the running variance from jumping": _bounded,
    "7. clipping prevents B in batch after one corrupted image a batch": _one_image,
    "8. the price: batch, scaled by 1e3, has A1 with clipping only": _price,
    "9. the mean is not clipped: batch, constant 1e3, has B either way": _mean,
    "10. clipping leaves clean training as it is, to a point": _clean,
}


def judge(runs: Runs, claims: dict[str, Claim]) -> list[Verdict]:
    verdicts = []
    for claim, measure in claims.items():
        try:
            verdicts.append(Verdict(claim, *measure(runs)))
        except _NotRunError:
            verdicts.append(Verdict(claim, "nothing to judge it by", None))
    return verdicts
