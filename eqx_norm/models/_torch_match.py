"""Matches the layers of a model with the entries of a `state_dict`, and reports the result."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ._layers import listed
from ._torch_layers import COUNT, Layers, Slot

Names = Mapping[str, str | None] | Callable[[str], str | None] | None


class TorchReport(NamedTuple):
    """Reports what `from_torch` loaded from where; prints as a table.

    **Fields:**

    - `matched`: the prefix in the `state_dict` of each loaded layer, by the layer's path.
    - `skipped`: paths of the layers that `names` leaves out.
    - `missing`: keys that the `state_dict` lacks; their arrays in the model are unchanged.
    - `unexpected`: keys of the `state_dict` that belong to no layer.
    """

    matched: dict[str, str]
    skipped: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __str__(self) -> str:
        shown = {path or "(the layer itself)": to for path, to in self.matched.items()}
        width = max(map(len, shown), default=0)
        rows = [
            f"{path:{width}}  <-  {to or '(the layer itself)'}" for path, to in shown.items()
        ]
        skipped = [f"left out by names: {', '.join(self.skipped)}"] if self.skipped else []
        return "\n".join([*rows, *skipped, *self.leftovers])

    @property
    def leftovers(self) -> list[str]:
        """Returns a line that lists `missing`, and one that lists `unexpected`."""
        only = {"only in the model": self.missing, "only in the state_dict": self.unexpected}
        return [f"{title}: {listed(of)}" for title, of in only.items() if of]


def match(
    layers: Layers, given: Mapping[str, np.ndarray], names: Names
) -> tuple[TorchReport, list[tuple[str, Slot]]]:
    """Returns the report for these layers, and each key that was found with its slot."""
    pairs, named = prefixes(layers, names), _named(layers, names)
    keys = {p: _keys(slots, pairs[p]) for p, slots in layers.items()}
    absent = {p: layers[p] for p in layers if p not in named and not keys[p] & given.keys()}
    skipped = {p: _unless_skipped(p, names) for p, to in pairs.items() if to is None}
    taken = {*pairs.values(), *skipped.values()}
    for path, prefix in _by_order(absent, given, taken).items():
        pairs[path], keys[path] = prefix, _keys(layers[path], prefix)
    matched = {p: to for p, to in pairs.items() if to is not None and keys[p] & given.keys()}
    slots = [(key(to, n), slot) for p, to in matched.items() for n, slot in layers[p].items()]
    # Entries of skipped layers are not left over.
    out = tuple(f"{prefix}." for prefix in skipped.values())
    wanted = dict.fromkeys(k for path in layers for k in sorted(keys[path]))
    missing = tuple(k for k in wanted if k not in given and not k.endswith(COUNT))
    unexpected = tuple(k for k in given if k not in wanted and not f"{k}.".startswith(out))
    report = TorchReport(matched, tuple(skipped), missing, unexpected)
    return report, [(k, slot) for k, slot in slots if k in given]


def prefixes(paths: Iterable[str], names: Names) -> dict[str, str | None]:
    """Returns PyTorch's prefix for each path: from `names`, or the path with dots.

    **Raises:** `ValueError` if `names` has a key with which no path begins.
    """
    paths = list(paths)
    parts = names if isinstance(names, Mapping) else {}
    unused = [p for p in parts if not any(_begins(_dotted(path), _dotted(p)) for path in paths)]
    if unused:
        raise ValueError(
            f"names has {unused}, but no layer's path begins so. The paths are "
            f"{listed(map(repr, paths))}."
        )
    return {path: _dotted(path) for path in paths} | _named(paths, names)


def _keys(slots: Mapping[str, Slot], prefix: str | None) -> set[str]:
    return set() if prefix is None else {key(prefix, name) for name in slots}


def key(prefix: str, name: str) -> str:
    """Returns the key of an array in a `state_dict`."""
    return ".".join(part for part in (prefix, name) if part)


def _named(paths: Iterable[str], names: Names) -> dict[str, str | None]:
    """Returns the prefixes of those paths that `names` mentions. A mapping replaces the longest
    beginning of a path that it has."""
    if callable(names):
        found = {path: names(path) for path in paths}
        return {path: None if to is None else _dotted(to) for path, to in found.items()}
    parts, found = {_dotted(part): to for part, to in (names or {}).items()}, {}
    for path in paths:
        own = _dotted(path)
        if fitting := [part for part in parts if _begins(own, part)]:
            part = max(fitting, key=len)
            to = parts[part]
            found[path] = None if to is None else key(to, own[len(part) :].removeprefix("."))
    return found


def _unless_skipped(path: str, names: Names) -> str:
    """Returns the prefix that a layer which `names` leaves out would have otherwise."""
    parts = names if isinstance(names, Mapping) else {}
    kept = {part: to for part, to in parts.items() if to is not None}
    return _named([path], kept).get(path) or _dotted(path)


def _by_order(
    absent: Layers, given: Mapping[str, np.ndarray], taken: Iterable[str | None]
) -> dict[str, str]:
    """Matches layers by order, in each group whose arrays have the same names and shapes, if it
    is equally large in the model and the `state_dict`."""
    groups = defaultdict[str, set[tuple[str, tuple[int, ...]]]](set)
    for k, array in given.items():
        prefix, _, name = k.rpartition(".")
        if name != COUNT:
            groups[prefix].add((name, array.shape))
    here, there = defaultdict[object, list[str]](list), defaultdict[object, list[str]](list)
    for path, slots in absent.items():
        form = frozenset((name, slot.shape) for name, slot in slots.items() if name != COUNT)
        here[form].append(path)
    for prefix, shapes in groups.items():
        if prefix not in taken:
            there[frozenset(shapes)].append(prefix)
    alike = [(here[form], there[form]) for form in here if len(here[form]) == len(there[form])]
    return {path: to for paths, others in alike for path, to in zip(paths, others, strict=True)}


def _dotted(path: str) -> str:
    """Returns `layers[1].norm` as PyTorch writes it, `layers.1.norm`."""
    return re.sub(r"\[(?:'([^']*)'|(\d+))\]", r".\1\2", path).removeprefix(".")


def _begins(path: str, part: str) -> bool:
    return not part or path == part or path.startswith(f"{part}.")
