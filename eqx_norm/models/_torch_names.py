"""Finds out which layer of a model is which of a `state_dict`, and reports it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ._torch_layers import (
    COUNT,
    FAMILIES,
    NAMES,
    dotted,
    entries,
    family,
    family_there,
    optional,
)

Names = Mapping[str, str | None] | Callable[[str], str | None] | None
Rows = list[tuple[str, str, str, str]]


class TorchReport(NamedTuple):
    """Says what `from_torch` has loaded from where; prints as a table.

    **Fields:**

    - `matched`: for each layer that was loaded, by its path, the prefix of its entries in the
        `state_dict`.
    - `skipped`: paths of layers that `names` leaves out.
    - `missing`: paths of layers that the `state_dict` has nothing for; they are as they were.
    - `unexpected`: keys of the `state_dict` that belong to none of the layers.
    """

    matched: dict[str, str]
    skipped: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __str__(self) -> str:
        rows = [(_shown(path), "<-", _shown(there)) for path, there in self.matched.items()]
        rest = {
            "left out by names": self.skipped,
            "only in the model": self.missing,
            "only in the state_dict": self.unexpected,
        }
        listed = [line for title, of in rest.items() for line in _listed(title, of)]
        return "\n".join([*aligned(rows), *listed])


class Matched(NamedTuple):
    """Holds what was found out, before anything is loaded."""

    report: TorchReport
    wrong: Rows  # path here, key in PyTorch, the shape here, the shape there
    uneven: list[str]  # what is not matched by order, and why


def match(layers: Mapping[str, Any], given: Mapping[str, np.ndarray], names: Names) -> Matched:
    """Returns which of the layers, given by their paths, is which in the `state_dict`."""
    groups = _groups(given)
    pairs, uneven = (
        _by_order(layers, groups) if names is None else (prefixes(layers, names), [])
    )
    matched, skipped, missing, wrong, used = {}, [], [], [], set[str]()
    for path, node in layers.items():
        of, may, prefix = entries(node), optional(node), pairs.get(path)
        if not (of or may):
            continue
        if prefix is None:
            (skipped if path in pairs else missing).append(path)
            if path in pairs:  # what would have been loaded is not left over
                own = _own(path, names)
                used |= {key(own, name) for name in (of if "" in of else groups.get(own, {}))}
            continue
        group = groups.get(prefix, {})
        held = {name for name in of if key(prefix, name) in given}
        if not held and not set(group) & set(NAMES):
            missing += [path] if of else []
            continue
        matched[path] = prefix
        others = set[str]() if "" in of else set(NAMES) & set(group) - set(of) - may
        used |= {key(prefix, name) for name in {*held, *others, *(may & set(group))}}
        for name, entry in of.items():
            there = given.get(key(prefix, name))
            if there is None or there.shape != entry.shape:
                wrong.append((path, key(prefix, name), _shape(entry), _shape(there)))
        if COUNT in may & set(group) and group[COUNT].shape != ():
            wrong.append((path, key(prefix, COUNT), "()", _shape(group[COUNT])))
        for name in sorted(others):
            wrong.append((path, key(prefix, name), "-", _shape(group[name])))
    unexpected = tuple(k for k in given if k not in used)
    report = TorchReport(matched, tuple(skipped), tuple(missing), unexpected)
    return Matched(report, wrong, uneven)


def prefixes(paths: Iterable[str], names: Names) -> dict[str, str | None]:
    """Returns PyTorch's prefix for each path: that of `names`, or the path with dots.

    Where `names` is a mapping, the longest part of a path that it has is replaced.
    """
    paths = list(paths)
    if callable(names):
        named = {path: names(path) for path in paths}
        return {path: None if to is None else dotted(to) for path, to in named.items()}
    names = names or {}
    parts = {dotted(part): to for part, to in names.items()}
    found: dict[str, str | None] = {}
    used = set[str]()
    for path in paths:
        there = dotted(path)
        fitting = [part for part in parts if _begins(there, part)]
        used.update(fitting)
        if fitting:
            part = max(fitting, key=len)
            rest, to = there[len(part) :].removeprefix("."), parts[part]
            there = None if to is None else key(to, rest)
        found[path] = there
    if unused := [part for part in names if dotted(part) not in used]:
        raise ValueError(
            f"names has {unused}, with which no path of a layer here begins. The "
            f"paths are {', '.join(map(repr, paths))}."
        )
    return found


def key(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)


def aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Returns lines in which the columns of the rows stand below each other."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def refusal(matched: Matched, strict: bool) -> str | None:
    """Returns what is wrong with a match, in words; `None` if it may be loaded."""
    report, wrong, uneven = matched
    lines = []
    if wrong:
        head = ("here", "in the state_dict", "shape here, as PyTorch has it", "shape there")
        lines += aligned([head, *((_shown(row[0]), *row[1:]) for row in wrong)])
        lines += ["Make the model with these arrays and shapes, or say by names= what is what."]
    if strict and (report.missing or report.unexpected):
        lines += [f"not matched by their order: {of}" for of in uneven]
        lines += _listed("only in the model", report.missing)
        lines += _listed("only in the state_dict", report.unexpected)
        lines += [
            "Say by names= what is what (names={} where the names are the same; None for a "
            "layer that is to stay as it is), or load what there is by strict=False."
        ]
    return "\n    ".join(["Nothing was loaded, for these differ:", *lines]) if lines else None


def _by_order(
    layers: Mapping[str, Any], groups: Mapping[str, Mapping[str, np.ndarray]]
) -> tuple[dict[str, str | None], list[str]]:
    """Returns the k-th layer of a family for the k-th of the same family, where there are
    equally many; an array of no layer is matched by name. And where there are not, in words."""
    pairs: dict[str, str | None] = {}
    uneven: list[str] = []
    for name in FAMILIES:
        of = {path: node for path, node in layers.items() if family(node) == name}
        here = [path for path, node in of.items() if entries(node) or optional(node)]
        there = [prefix for prefix, group in groups.items() if family_there(group) == name]
        if len(here) == len(there):
            pairs |= dict(zip(here, there, strict=True))
        else:
            uneven.append(f"{name}, {len(here)} in the model, {len(there)} in the state_dict")
    arrays = {path: dotted(path) for path, node in layers.items() if family(node) is None}
    return pairs | arrays, uneven


def _own(path: str, names: Names) -> str:
    """Returns the prefix of a layer that `names` leaves out, if it did not."""
    parts, there = names if isinstance(names, Mapping) else {}, dotted(path)
    parts = {part: to for part, to in parts.items() if _begins(there, dotted(part))}
    named = {part: to for part, to in parts.items() if to is not None}
    return prefixes([path], named)[path] or ""


def _groups(given: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Returns the entries of each layer by their names, in the order of the layers."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    for k, array in given.items():
        prefix, _, name = k.rpartition(".")
        groups.setdefault(prefix, {})[name] = array
    return groups


def _begins(path: str, part: str) -> bool:
    return not part or path == part or path.startswith(f"{part}.")


def _listed(title: str, of: Iterable[str]) -> list[str]:
    return [f"{title}: {', '.join(map(_shown, of))}"] if of else []


def _shape(of: Any) -> str:
    return "-" if of is None else str(tuple(of.shape))


def _shown(path: str) -> str:
    return path or "(the layer itself)"
