"""Defines the rows of a step: a plan, which is known before it runs, and the fingerprints."""

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

import equinox as eqx
from jaxtyping import Array, Shaped, UInt32
from numpy import ndarray

# The kind of a mark. `remat` marks what it computes again as "recomputed"; "done" is a value
# whose row has been taken.
Kind = Literal["forward", "tangent", "cotangent", "recomputed", "done"]


class Probe(NamedTuple):
    """Gives one row each time that it is passed.

    In a `shard_map`, `axes` are those of the mesh over which the value is cut up, and `shape`
    is that of the whole.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...] = ()


class Loop(NamedTuple):
    """Gives the rows of `body` once for each iteration."""

    length: int
    reverse: bool
    body: "Plan"


# In the order of the program.
Plan = tuple[Probe | Loop, ...]


class Record(eqx.Module):
    """Holds what the probes of one step have seen: 8 bytes a row. For `Ledger.append`.

    It is a tree of arrays, which `jax.jit`, `jax.vmap` and `jax.lax.scan` may return;
    `jax.tree.map(lambda a: a[i], records)` takes out one member or step.
    """

    fingerprints: UInt32[Array | ndarray, "*mapped rows 2"]
    values: tuple[Shaped[Array | ndarray, "..."], ...]
    plan: Plan = eqx.field(static=True)


class Place(NamedTuple):
    """Says where a row comes from: its probe (`number` among those of the plan), the iteration
    of each loop around it, and whether its name occurs for the first time or again."""

    probe: Probe
    number: int
    iteration: tuple[int, ...]
    again: int


@functools.lru_cache(maxsize=32)
def places(plan: Plan) -> tuple[Place, ...]:
    """Returns the place of each row, in order; a loop gives its rows iteration by iteration."""
    seen: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    found = []

    def visit(plan: Plan, number: int, iteration: tuple[int, ...]) -> None:
        for item in plan:
            if isinstance(item, Probe):
                key = (item.name, item.kind, iteration)
                seen[key] += 1
                found.append(Place(item, number, iteration, seen[key]))
            else:
                for i in range(item.length)[:: -1 if item.reverse else 1]:
                    visit(item.body, number, (*iteration, i))
            number += len([*probes((item,))])

    visit(plan, 0, ())
    return tuple(found)


def probes(plan: Plan, depth: int = 0) -> Iterator[tuple[Probe, int]]:
    """Yields each probe, and how many loops are around it."""
    for item in plan:
        if isinstance(item, Probe):
            yield item, depth
        else:
            yield from probes(item.body, depth + 1)
