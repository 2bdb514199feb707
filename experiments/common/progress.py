"""Shows on a terminal how far an experiment is."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
Result = TypeVar("Result")


def progress(
    items: Iterable[Item], unit: str, title: str | None = None, total: int | None = None
) -> Iterable[Item]:
    """Returns the items, and shows a bar; with a title the bar vanishes at the end."""
    return tqdm(items, title, total, unit=unit, leave=title is None, disable=None)


def say(line: str) -> None:
    """Prints a line above the bars."""
    tqdm.write(line)


def in_threads(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    unit: str,
    title: str | None = None,
) -> list[Result]:
    """Returns the function's result for each item, in order, and shows a bar.

    Two threads are enough where most of the time is compiling, which XLA does in parallel.
    """
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(function, items)
        return [*progress(results, unit, title, len(items))]
