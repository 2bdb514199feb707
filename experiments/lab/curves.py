"""Keeps what was recorded step by step, by setting and over several seeds.

A row is a `NamedTuple` whose first fields say what was run, and then come `seed`, `step` and
the recorded quantities, each under the name that a record has for it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .rows import by

Setting = TypeVar("Setting", bound=tuple[Any, ...])
Curves = dict[str, NDArray[Any]]  # by quantity, and of "step": each [seeds, steps]


def steps(
    kind: Any, setting: tuple[Any, ...], seed: int, record: Mapping[str, NDArray[Any]]
) -> Iterator[Any]:
    """Yields the rows of one run, from step 1 on."""
    columns = [record[name] for name in kind._fields[len(setting) + 2 :]]
    for step, values in enumerate(zip(*columns, strict=True), start=1):
        yield kind(*setting, seed, step, *map(float, values))


def by_setting(rows: Iterable[Any], setting: type[Setting]) -> dict[Setting, Curves]:
    """Returns the curves of each setting; every one of its seeds has the same steps."""

    def curves(rows: list[Any]) -> Curves:
        seeds = len({row.seed for row in rows})
        names = rows[0]._fields[rows[0]._fields.index("step") :]
        columns = {name: [getattr(row, name) for row in rows] for name in names}
        return {name: np.reshape(column, (seeds, -1)) for name, column in columns.items()}

    found = by(rows, lambda row: setting(*row[: row._fields.index("seed")]))
    return {setting: curves(of_setting) for setting, of_setting in found.items()}
