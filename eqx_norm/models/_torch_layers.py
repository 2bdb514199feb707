"""Lists a model's arrays by PyTorch's names, and matches the arrays with a `state_dict`."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import equinox as eqx
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from eqx_norm import _contract, _memory
from eqx_norm._batch_norm import BatchNorm

from ._carry import batches_of
from ._layers import (
    LINEAR,
    NORMS,
    check_single,
    checked_entries,
    checked_mapping,
    listed,
    located,
    path_of,
)

Names = Mapping[str, str | None] | Callable[[str], str | None] | None
_KNOWN = (*LINEAR, *NORMS, eqx.nn.PReLU, eqx.nn.Embedding)
# PyTorch's names of the fields of these layers, and of the statistics of a batch norm.
_FIELDS = {"weight": "weight", "bias": "bias", "negative_slope": "weight"}
MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"


class TorchReport(NamedTuple):
    """Reports which layers `from_torch` loaded from which prefixes; prints as a table.

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


class Slot(NamedTuple):
    """Holds an array, and converts its layout from and to PyTorch's.

    **Fields:** `path`: the array's path in the model, or the norm's path and a statistic's
    name; `is_flat`: whether PyTorch's array has one axis; `groups`: for the weight of a
    transposed convolution, the number of groups; `statistic`: `MEAN`, `VARIANCE` or `COUNT`
    for a statistic of a batch norm.
    """

    path: str
    array: Shaped[Array | np.ndarray, "..."]
    is_flat: bool = False
    groups: int | None = None
    statistic: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the array's shape in PyTorch."""
        return self.to_torch(np.empty(self.array.shape, bool)).shape

    def from_torch(self, array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        return self._of_other_convolution(array).reshape(self.array.shape)

    def to_torch(self, array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        return array.reshape(-1) if self.is_flat else self._of_other_convolution(array)

    def _of_other_convolution(
        self, weight: Shaped[np.ndarray, "..."]
    ) -> Shaped[np.ndarray, "..."]:
        """Converts the weight of a transposed convolution, in either direction: Equinox stores
        the weight of the computed convolution, PyTorch of the convolution to transpose."""
        if self.groups is None:
            return weight
        first, second, *kernel = weight.shape
        weight = np.flip(weight, tuple(range(2, weight.ndim)))
        weight = weight.reshape(self.groups, first // self.groups, second, *kernel)
        return weight.swapaxes(1, 2).reshape(second * self.groups, -1, *kernel)


def _nodes_of(model: PyTree, above: jtu.KeyPath = ()) -> dict[str, PyTree]:
    """Returns the layers that PyTorch may have, and the arrays outside of layers, by path."""
    nodes = dict[str, PyTree]()
    owner = path_of(above)

    def is_inner(node: PyTree) -> bool:
        return node is not model and isinstance(node, _KNOWN)

    for below, node in jtu.tree_leaves_with_path(model, is_leaf=is_inner):
        if is_inner(node):
            nodes |= _nodes_of(node, (*above, *below))
        elif eqx.is_inexact_array(node):
            if isinstance(model, _KNOWN) and path_of(below) in _FIELDS:
                nodes[owner] = model
            else:
                nodes[path_of((*above, *below))] = node
    if isinstance(model, eqx.nn.BatchNorm):  # has statistics, even without weights
        nodes[owner] = model
    return nodes


def _slots_of(path: str, node: PyTree, state: eqx.nn.State | None) -> dict[str, Slot]:
    """Returns the arrays of a layer, or an array outside of layers, by PyTorch's names."""
    if not isinstance(node, _KNOWN):
        return {"": Slot(path, node)}
    slots = dict[str, Slot]()
    with located(path, node):
        check_single(node)
        for field, name in _FIELDS.items():
            array: PyTree = getattr(node, field, None)
            if eqx.is_inexact_array(array):
                slots[name] = _slot(f"{path}.{field}".removeprefix("."), node, field, array)
        if isinstance(node, eqx.nn.BatchNorm):
            slots |= _statistics(path, node, state)
    return slots


def _statistics(path: str, norm: PyTree, state: eqx.nn.State | None) -> dict[str, Slot]:
    if not isinstance(norm, BatchNorm):
        raise ValueError(
            "it is an eqx.nn.BatchNorm: convert it first by eqx_norm.models.swap(model, state)."
        )
    if state is None:
        raise ValueError("its statistics are in the model's state: pass state, too.")
    memory = _memory.recall(norm, state)
    moments = _contract.running(norm, memory.statistics)
    count = np.array(batches_of(norm, memory), np.int64)
    arrays = {MEAN: moments.mean, VARIANCE: moments.variance, COUNT: count}
    return {
        name: Slot(f"{path}.{name}", array, statistic=name) for name, array in arrays.items()
    }


def _slot(
    path: str, layer: PyTree, field: str, array: Shaped[Array | np.ndarray, "..."]
) -> Slot:
    if isinstance(layer, eqx.nn.ConvTranspose) and field == "weight":
        return Slot(path, array, groups=layer.groups)
    # The bias of a convolution has spatial axes, too; PReLU's slope may have any shape.
    is_bias = isinstance(layer, eqx.nn.Conv | eqx.nn.ConvTranspose) and field == "bias"
    return Slot(path, array, is_flat=is_bias or isinstance(layer, eqx.nn.PReLU))


def match(
    model: PyTree, state: eqx.nn.State | None, arrays: Collection[str], names: Names
) -> tuple[TorchReport, list[tuple[str, Slot]]]:
    """Matches layers with the names of a `state_dict`'s arrays. Returns the report, and the
    keys and arrays of all layers that `names` does not leave out."""
    checked_entries(model, state, {})
    nodes = _nodes_of(model)
    prefixes, skipped = _prefixes_of(nodes, names)
    matched = dict[str, str]()
    keyed = list[tuple[str, Slot]]()
    for path, node in nodes.items():
        if path in skipped:
            continue
        slots = _slots_of(path, node, state)
        layer = [(_key(prefixes[path], name), slot) for name, slot in slots.items()]
        keyed += layer
        if any(key in arrays for key, _ in layer):
            matched[path] = prefixes[path]
    wanted = dict(keyed)
    missing = [k for k, s in wanted.items() if k not in arrays and s.statistic != COUNT]
    left_out = {prefixes[path] for path in skipped}
    unexpected = [
        key
        for key in arrays
        if key not in wanted and not any(_begins(key, prefix) for prefix in left_out)
    ]
    return TorchReport(matched, tuple(skipped), tuple(missing), tuple(unexpected)), keyed


def _prefixes_of(paths: Iterable[str], names: Names) -> tuple[dict[str, str], list[str]]:
    """Returns PyTorch's prefix for each path, and the paths that `names` leaves out. A path
    that is left out gets the prefix of the whole part of the model that is left out."""
    hint = (
        "paths to PyTorch's prefixes, such as the report.matched of from_torch, and no "
        "function that returns prefixes."
    )
    dotted = {path: _dotted(path) for path in paths}
    if names is None:
        names = {}
    elif callable(names):
        names = {path: names(path) for path in dotted}
    pairs = checked_mapping("names", names, hint)
    unused = [p for p in pairs if not any(_begins(d, _dotted(p)) for d in dotted.values())]
    if unused:
        raise ValueError(
            f"names has {unused}, but no layer's path begins so. The paths are "
            f"{listed(map(repr, dotted))}."
        )
    # If a path is written in two ways, the last entry decides, as in `report.matched | {...}`.
    rules = {_dotted(part): prefix for part, prefix in pairs.items()}
    prefixes = dict[str, str]()
    skipped = list[str]()
    for path, name in dotted.items():
        parts = [part for part in rules if _begins(name, part)]
        parts.sort(key=len, reverse=True)  # the longest part decides
        if parts and rules[parts[0]] is None:
            skipped.append(path)
            name = parts[0]
        part = next((part for part in parts if rules[part] is not None), "")
        prefix = rules.get(part) or ""
        prefixes[path] = _key(_dotted(prefix), name[len(part) :].removeprefix("."))
    return prefixes, skipped


def _key(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)


def _dotted(path: str) -> str:
    """Returns `layers[1].norm` as PyTorch writes it, `layers.1.norm`."""
    return re.sub(r"\[(?:'([^']*)'|(\d+))\]", r".\1\2", path).removeprefix(".")


def _begins(path: str, part: str) -> bool:
    return not part or f"{path}.".startswith(f"{part}.")
