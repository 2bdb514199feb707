"""Matches the layers of a model with the entries of a `state_dict`, and reports the result."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    parts = _parts(slots, names)
    prefixes = {path: _prefix(path, parts) for path in slots}
    # The prefixes that layers left out would have: their entries are not left over.
    kept = {part: prefix for part, prefix in parts.items() if prefix is not None}
    skipped = {p: _prefix(p, kept) or "" for p, prefix in prefixes.items() if prefix is None}
    keys = {path: _keys(slots[path], prefix) for path, prefix in prefixes.items()}
    unnamed = [p for p in slots if not any(_begins(_dotted(p), part) for part in parts)]
    absent = {p: slots[p] for p in unnamed if not keys[p] & arrays.keys()}
    for path, prefix in _by_order(absent, arrays, {*prefixes.values(), *skipped.values()}):
        prefixes[path], keys[path] = prefix, _keys(slots[path], prefix)
    matched = {p: prefixes[p] or "" for p in slots if keys[p] & arrays.keys()}
    wanted = dict.fromkeys(k for path in slots for k in sorted(keys[path]))
    missing = tuple(k for k in wanted if k not in arrays and not k.endswith(COUNT))
    out = tuple(f"{prefix}." for prefix in skipped.values())
    unexpected = tuple(k for k in arrays if k not in wanted and not f"{k}.".startswith(out))
    return TorchReport(matched, tuple(skipped), missing, unexpected)


def prefixes_of(paths: Iterable[str], names: Names) -> dict[str, str | None]:
    """Returns PyTorch's prefix for each path: from `names`, or the path with dots.

    **Raises:** `ValueError` if `names` has a key with which no path begins.
    """
    paths = list(paths)
    parts = _parts(paths, names)
    return {path: _prefix(path, parts) for path in paths}


def key(prefix: str, name: str) -> str:
    """Returns the key of an array in a `state_dict`."""
    return ".".join(part for part in (prefix, name) if part)


def _keys(names: Iterable[str], prefix: str | None) -> set[str]:
    return set() if prefix is None else {key(prefix, name) for name in names}


def _parts(paths: Iterable[str], names: Names) -> dict[str, str | None]:
    """Returns PyTorch's prefixes by paths or their beginnings, both with dots."""
    dotted = {path: _dotted(path) for path in paths}
    pairs = {path: names(path) for path in dotted} if callable(names) else names or {}
    unused = [p for p in pairs if not any(_begins(d, _dotted(p)) for d in dotted.values())]
    if unused:
        raise ValueError(
            f"names has {unused}, but no layer's path begins so. The paths are "
            f"{listed(map(repr, dotted))}."
        )
    return {_dotted(p): None if name is None else _dotted(name) for p, name in pairs.items()}


def _prefix(path: str, parts: Mapping[str, str | None]) -> str | None:
    """Returns PyTorch's prefix for a path: its longest beginning in `parts` is replaced."""
    path = _dotted(path)
    part = max((part for part in parts if _begins(path, part)), key=len, default=None)
    if part is None:
        return path
    prefix = parts[part]
    return None if prefix is None else key(prefix, path[len(part) :].removeprefix("."))


def _by_order(
    slots: Slots, arrays: Mapping[str, np.ndarray], taken: Iterable[str | None]
) -> Iterator[tuple[str, str]]:
    """Yields layers and prefixes by order, in each group whose arrays have the same names and
    shapes, if it is equally large in the model and the `state_dict`."""
    forms = defaultdict[str, set[tuple[str, tuple[int, ...]]]](set)
    for k, array in arrays.items():
        prefix, _, name = k.rpartition(".")
        if name != COUNT and prefix not in taken:
            forms[prefix].add((name, array.shape))
    paths, prefixes = defaultdict[object, list[str]](list), defaultdict[object, list[str]](list)
    for path, layer in slots.items():
        form = frozenset((name, slot.shape) for name, slot in layer.items() if name != COUNT)
        paths[form].append(path)
    for prefix, form in forms.items():
        prefixes[frozenset(form)].append(prefix)
    for form, layers in paths.items():
        if len(layers) == len(prefixes[form]):
            yield from zip(layers, prefixes[form], strict=True)


def _dotted(path: str) -> str:
    """Returns `layers[1].norm` as PyTorch writes it, `layers.1.norm`."""
    return re.sub(r"\[(?:'([^']*)'|(\d+))\]", r".\1\2", path).removeprefix(".")


def _begins(path: str, part: str) -> bool:
    return not part or f"{path}.".startswith(f"{part}.")
