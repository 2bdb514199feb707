"""Matches the layers of a model with the entries of a `state_dict`, and reports the result."""

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ._layers import listed
from ._torch_layers import COUNT, Slots

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
        itself = "(the layer itself)"
        pairs = [(path or itself, prefix or itself) for path, prefix in self.matched.items()]
        width = max((len(path) for path, _ in pairs), default=0)
        rows = [f"{path:{width}}  <-  {prefix}" for path, prefix in pairs]
        skipped = [f"left out by names: {', '.join(self.skipped)}"] if self.skipped else []
        return "\n".join([*rows, *skipped, *self.leftovers])

    @property
    def leftovers(self) -> list[str]:
        """Returns a line that lists `missing`, and one that lists `unexpected`."""
        only = {"only in the model": self.missing, "only in the state_dict": self.unexpected}
        return [f"{title}: {listed(keys)}" for title, keys in only.items() if keys]


def match(slots: Slots, arrays: Mapping[str, np.ndarray], names: Names) -> TorchReport:
    """Returns which layers and which entries of a `state_dict` belong together."""
    prefixes, named, skipped = prefixes_of(slots, names)

    def keys(path: str) -> list[str]:
        return [key(prefixes[path], name) for name in sorted(slots[path])]

    def is_there(path: str) -> bool:
        return not arrays.keys().isdisjoint(keys(path))

    absent = {p: slots[p] for p in slots if p not in named and not is_there(p)}
    prefixes |= _by_order(absent, arrays, {*prefixes.values()})
    wanted = dict.fromkeys(k for path in slots if path not in skipped for k in keys(path))
    matched = {p: prefixes[p] for p in slots if p not in skipped and is_there(p)}
    missing = tuple(k for k in wanted if k not in arrays and not k.endswith(COUNT))
    left_out = tuple(f"{prefixes[path]}." for path in skipped)
    unexpected = (k for k in arrays if k not in wanted and not f"{k}.".startswith(left_out))
    return TorchReport(matched, tuple(skipped), missing, tuple(unexpected))


def prefixes_of(
    paths: Iterable[str], names: Names
) -> tuple[dict[str, str], list[str], list[str]]:
    """Returns PyTorch's prefix for each path, the paths that `names` decides on, and those of
    them that it leaves out, whose prefix is the one that they would have otherwise."""
    dotted = {path: _dotted(path) for path in paths}
    pairs = {path: names(path) for path in dotted} if callable(names) else names or {}
    if unused := [p for p in pairs if not any(_begins(d, _dotted(p)) for d in dotted.values())]:
        raise ValueError(
            f"names has {unused}, but no layer's path begins so. The paths are "
            f"{listed(map(repr, dotted))}."
        )
    rules = [(_dotted(part), prefix) for part, prefix in pairs.items()]
    rules.sort(key=lambda rule: len(rule[0]), reverse=True)  # the longest decides
    prefixes, named, skipped = dict[str, str](), list[str](), list[str]()
    for path, name in dotted.items():
        applicable = [rule for rule in rules if _begins(name, rule[0])]
        part, prefix = next((rule for rule in applicable if rule[1] is not None), ("", ""))
        prefixes[path] = key(_dotted(prefix or ""), name[len(part) :].removeprefix("."))
        named += [path] if applicable else []
        skipped += [path] if applicable and applicable[0][1] is None else []
    return prefixes, named, skipped


def key(prefix: str, name: str) -> str:
    """Returns the key of an array in a `state_dict`."""
    return ".".join(part for part in (prefix, name) if part)


def _by_order(
    slots: Slots, arrays: Mapping[str, np.ndarray], taken: Container[str]
) -> dict[str, str]:
    """Returns prefixes of layers by order, in each group whose arrays have the same names and
    shapes, if it is equally large in the model and the `state_dict`."""
    ours = {
        path: {name: slot.shape for name, slot in layer.items()} | {COUNT: ()}
        for path, layer in slots.items()
    }
    theirs = defaultdict[str, dict[str, tuple[int, ...]]](dict)
    for k, array in arrays.items():
        prefix, _, name = k.rpartition(".")
        if prefix not in taken:
            theirs[prefix] |= {name: array.shape, COUNT: ()}
    prefixes = dict[str, str]()
    for path, shapes in ours.items():
        equal, candidates = ([p for p in d if d[p] == shapes] for d in (ours, theirs))
        if len(equal) == len(candidates):
            prefixes[path] = candidates[equal.index(path)]
    return prefixes


def _dotted(path: str) -> str:
    """Returns `layers[1].norm` as PyTorch writes it, `layers.1.norm`."""
    return re.sub(r"\[(?:'([^']*)'|(\d+))\]", r".\1\2", path).removeprefix(".")


def _begins(path: str, part: str) -> bool:
    return not part or f"{path}.".startswith(f"{part}.")
