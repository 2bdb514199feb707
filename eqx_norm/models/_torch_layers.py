"""Lists a model's arrays by PyTorch's names, and matches the arrays with a `state_dict`."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from eqx_norm import _contract, _memory
from eqx_norm._batch_norm import BatchNorm

from ._carry import batches_of
from ._layers import check_single, checked, checked_mapping, listed, located, path_of

Names = Mapping[str, str | None] | Callable[[str], str | None] | None
_CONVS = (eqx.nn.Conv, eqx.nn.ConvTranspose)
_NORMS = (eqx.nn.BatchNorm, eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm)
_KNOWN = (*_CONVS, *_NORMS, eqx.nn.PReLU, eqx.nn.Linear, eqx.nn.Embedding)
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
    transposed convolution, the number of groups.
    """

    path: str
    array: Any
    is_flat: bool = False
    groups: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the array's shape in PyTorch."""
        return self.to_torch(np.empty(self.array.shape, bool)).shape

    def from_torch(self, array: np.ndarray) -> np.ndarray:
        return self._turned(array).reshape(self.array.shape)

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(-1) if self.is_flat else self._turned(array)

    def _turned(self, weight: np.ndarray) -> np.ndarray:
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
    nodes, owner = dict[str, PyTree](), path_of(above)

    def is_inner(node: PyTree) -> bool:
        return node is not model and isinstance(node, _KNOWN)

    for below, node in jtu.tree_leaves_with_path(model, is_leaf=is_inner):
        if is_inner(node):
            nodes |= _nodes_of(node, (*above, *below))
        elif eqx.is_inexact_array(node):
            is_field = isinstance(model, _KNOWN) and path_of(below) in _FIELDS
            nodes |= {owner: model} if is_field else {path_of((*above, *below)): node}
    return nodes | ({owner: model} if isinstance(model, eqx.nn.BatchNorm) else {})


def _slots_of(path: str, node: PyTree, state: eqx.nn.State | None) -> dict[str, Slot]:
    """Returns the arrays of a layer, or an array outside of layers, by PyTorch's names."""
    if not isinstance(node, _KNOWN):
        return {"": Slot(path, node)}
    slots = dict[str, Slot]()
    with located(path, node):
        check_single(node)
        for field, name in _FIELDS.items():
            if eqx.is_inexact_array(array := getattr(node, field, None)):
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
    return {name: Slot(f"{path}.{name}", array) for name, array in arrays.items()}


def _slot(path: str, layer: PyTree, field: str, array: Any) -> Slot:
    if isinstance(layer, eqx.nn.ConvTranspose) and field == "weight":
        return Slot(path, array, groups=layer.groups)
    # The bias of a convolution has spatial axes, too; PReLU's slope may have any shape.
    is_bias = isinstance(layer, _CONVS) and field == "bias"
    return Slot(path, array, is_flat=is_bias or isinstance(layer, eqx.nn.PReLU))


def match(
    model: PyTree, state: eqx.nn.State | None, arrays: Collection[str], names: Names
) -> tuple[TorchReport, list[tuple[str, Slot]]]:
    """Matches layers with the names of a `state_dict`'s arrays. Returns the report, and the
    keys and arrays of all layers that `names` does not leave out."""
    checked(model, state, {})
    nodes = _nodes_of(model)
    prefixes, skipped = _prefixes_of(nodes, names)
    matched, keyed = dict[str, str](), list[tuple[str, Slot]]()
    for path in (path for path in nodes if path not in skipped):
        slots = _slots_of(path, nodes[path], state)
        layer = [(_key(prefixes[path], name), slot) for name, slot in slots.items()]
        keyed += layer
        if any(k in arrays for k, _ in layer):
            matched[path] = prefixes[path]
    wanted = dict(keyed)
    missing = tuple(k for k in wanted if k not in arrays and not k.endswith(COUNT))
    left_out = {prefixes[path] for path in skipped}
    left_over = (k for k in arrays if k not in wanted)
    unexpected = (k for k in left_over if not any(_begins(k, part) for part in left_out))
    return TorchReport(matched, tuple(skipped), missing, tuple(unexpected)), keyed


def _prefixes_of(paths: Iterable[str], names: Names) -> tuple[dict[str, str], list[str]]:
    """Returns PyTorch's prefix for each path, and the paths that `names` leaves out. A path
    that is left out gets the prefix of the whole part of the model that is left out."""
    hint = (
        "paths to PyTorch's prefixes, such as the report.matched of from_torch, and no "
        "function that returns prefixes."
    )
    dotted = {path: _dotted(path) for path in paths}
    pairs = {path: names(path) for path in dotted} if callable(names) else names
    pairs = checked_mapping("names", {} if pairs is None else pairs, hint)
    if unused := [p for p in pairs if not any(_begins(d, _dotted(p)) for d in dotted.values())]:
        raise ValueError(
            f"names has {unused}, but no layer's path begins so. The paths are "
            f"{listed(map(repr, dotted))}."
        )
    # If a path is written in two ways, the last entry decides, as in `report.matched | {...}`.
    rules = {_dotted(part): prefix for part, prefix in pairs.items()}
    rules = sorted(rules.items(), key=lambda rule: len(rule[0]), reverse=True)  # longest first
    prefixes, skipped = dict[str, str](), list[str]()
    for path, name in dotted.items():
        applicable = [rule for rule in rules if _begins(name, rule[0])]
        part, prefix = next((rule for rule in applicable if rule[1] is not None), ("", ""))
        if applicable and applicable[0][1] is None:
            skipped, name = [*skipped, path], applicable[0][0]
        prefixes[path] = _key(_dotted(prefix or ""), name[len(part) :].removeprefix("."))
    return prefixes, skipped


def _key(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)


def _dotted(path: str) -> str:
    """Returns `layers[1].norm` as PyTorch writes it, `layers.1.norm`."""
    return re.sub(r"\[(?:'([^']*)'|(\d+))\]", r".\1\2", path).removeprefix(".")


def _begins(path: str, part: str) -> bool:
    return not part or f"{path}.".startswith(f"{part}.")
