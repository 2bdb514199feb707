"""Which rows a program gives, known before it runs."""

import functools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ._primitive import Kind


class Probe(NamedTuple):
    """One row each time that it is passed. In a `shard_map` the value is cut up over those
    `axes` of the mesh; `shape` is that of the whole."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...] = ()


class Loop(NamedTuple):
    """The rows of `body`, once for each iteration."""

    length: int
    reverse: bool
    body: "Plan"


# In the order of the program.
Plan = tuple[Probe | Loop, ...]


class Place(NamedTuple):
    """Where a row comes from: its probe (`number` among those of the plan), the iteration of
    each loop around it, and whether the name is there for the first time or again."""

    probe: Probe
    number: int
    iteration: tuple[int, ...]
    again: int


@functools.lru_cache(maxsize=32)
def places(plan: Plan) -> tuple[Place, ...]:
    """One for each row, in order: of a loop, iteration after iteration, as they are run."""
    seen: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    result = []
    for probe, number, iteration in _passed(plan):
        key = (probe.name, probe.kind, iteration)
        seen[key] += 1
        result.append(Place(probe, number, iteration, seen[key]))
    return tuple(result)


def probes(plan: Plan, depth: int = 0) -> Iterator[tuple[Probe, int]]:
    """Each probe, and how many loops are around it."""
    for item in plan:
        if isinstance(item, Probe):
            yield item, depth
        else:
            yield from probes(item.body, depth + 1)


def count(plan: Plan) -> int:
    """Its rows."""
    return sum(
        1 if isinstance(item, Probe) else item.length * count(item.body) for item in plan
    )


def _passed(plan: Plan, number: int = 0) -> Iterator[tuple[Probe, int, tuple[int, ...]]]:
    for item in plan:
        if isinstance(item, Probe):
            yield item, number, ()
            number += 1
        else:
            for i in reversed(range(item.length)) if item.reverse else range(item.length):
                for probe, inner, iteration in _passed(item.body, number):
                    yield probe, inner, (i, *iteration)
            number += len(list(probes(item.body)))
