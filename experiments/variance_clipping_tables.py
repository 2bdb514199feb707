"""The tables of the variance clipping experiment."""

from collections.abc import Callable

from . import results
from . import variance_clipping_claims as claims
from .variance_clipping_claims import (
    COLLAPSED,
    EXPLODED,
    FAILURES,
    FINE,
    FOUND,
    RUINED,
    THREAD,
    Verdict,
)
from .variance_clipping_corruptions import CLEAN
from .variance_clipping_runs import WINDOW, Runs, Setting

LEGEND = (
    f"A1: the largest gradient is more than {EXPLODED:g} times the clean run's.\n"
    f"A2: training accuracy is below {COLLAPSED:.0%} in the {WINDOW} steps after.\n"
    f"B: at the end, training accuracy is within {100 * FINE:g} points of the clean run's,\n"
    f"and test accuracy is {100 * RUINED:g} points or more below it. Each in most of the seeds."
)
WORDS = {True: "holds", False: "DOES NOT HOLD", None: "not run"}


def _verdicts(title: str, verdicts: list[Verdict]) -> str:
    header = (title, "measured, median over seeds", "verdict")
    return results.table(header, [(v.claim, v.measured, WORDS[v.holds]) for v in verdicts])


def _grid(
    runs: Runs, title: str, cell: Callable[[Setting], str], *, clean: bool = False
) -> str:
    """One row per corruption, one column per layer."""
    layers = list(dict.fromkeys(setting.layer for setting in runs))
    rows: dict[str, list[str]] = {}
    for setting in runs:
        if clean or setting.corruption != CLEAN:
            rows.setdefault(setting.corruption, []).append(cell(setting))
    return results.table((title, *layers), [(name, *cells) for name, cells in rows.items()])


def _failures(runs: Runs, setting: Setting) -> list[str]:
    return [name for name, failure in FAILURES.items() if claims.seen(runs, setting, failure)]


def report(runs: Runs) -> tuple[str, list[Verdict], list[Verdict]]:
    """The tables for the terminal, and the verdicts: the thread's, and ours."""

    def points(setting: Setting) -> str:
        of = (claims.lost_at_once, claims.lost)
        at_once, later = (claims.median(runs, setting, points) for points in of)
        return " ".join((f"{at_once:z.1f} / {later:z.1f}", *_failures(runs, setting)))

    def gradient(setting: Setting) -> str:
        times = claims.median(runs, setting, claims.gradient)
        return f"{times:.1f}" if times < 100 else f"{times:,.0f}"

    def accuracy(setting: Setting) -> str:
        return f"{claims.median(runs, setting, claims.accuracy_after):.1%}"

    thread, found = claims.judge(runs, THREAD), claims.judge(runs, FOUND)
    tables = (
        _grid(runs, "test points lost, at once / 100 steps later", points),
        LEGEND,
        _grid(runs, "largest gradient, times the clean run's", gradient),
        _grid(runs, "training accuracy, 20 steps after", accuracy, clean=True),
        _both(thread, found),
    )
    return "\n\n".join(tables), thread, found


def summary(runs: Runs) -> str:
    """For the README: the verdicts."""
    return _both(claims.judge(runs, THREAD), claims.judge(runs, FOUND))


def _both(thread: list[Verdict], found: list[Verdict]) -> str:
    return f"{_verdicts('claim of Caffe #3963', thread)}\n\n{_verdicts('found here', found)}"
