"""Says of each kind of layer what PyTorch calls its arrays, and how they are laid out there."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from eqx_norm._batch_norm import BatchNorm

from ._layers import each, found

Convert = Callable[[np.ndarray], np.ndarray]

# What is found in a model: an entry here is a layer whose arrays are not looked for further,
# or an array outside of all these layers.
_NORMS = (eqx.nn.BatchNorm, eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm)
_OTHERS = (eqx.nn.Linear, eqx.nn.Embedding, eqx.nn.Conv, eqx.nn.ConvTranspose, eqx.nn.PReLU)
LAYERS = (*_NORMS, *_OTHERS)
_FOUND = (*LAYERS, eqx.nn.StateIndex, jax.Array, np.ndarray)

STATISTICS = ("running_mean", "running_var")
COUNT = "num_batches_tracked"
NAMES = ("weight", "bias", *STATISTICS, COUNT)

# By the order of layers, those are compared that a `state_dict` cannot tell apart.
FAMILIES = {
    "batch norms": BatchNorm,
    "other norms and PReLU": (*_NORMS[1:], eqx.nn.PReLU),
    "linear layers and embeddings": (eqx.nn.Linear, eqx.nn.Embedding),
    "convolutions": (eqx.nn.Conv, eqx.nn.ConvTranspose),
}


class Entry(NamedTuple):
    """Describes an array of a layer: its field here (`None`: it is in the state), its shape in
    PyTorch, and how to come from there to here and back."""

    field: str | None
    shape: tuple[int, ...]
    here: Convert
    there: Convert


def items(tree: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields path and layer, or path and array, of all that PyTorch may have a name for.

    A norm's activation, which may have a weight, is a layer of its own there.
    """
    for path, node in found(tree, _FOUND).items():
        path = joined(above, path)
        if isinstance(node, LAYERS) or eqx.is_inexact_array(node):
            yield path, node
        activation: Any = getattr(node, "activation", None)
        if activation is not None:
            yield from items(activation, f"{path}.activation")


def entries(node: Any) -> dict[str, Entry]:
    """Returns the arrays of a layer by PyTorch's names; an array itself has the name ""."""
    if isinstance(node, jax.Array | np.ndarray):
        return {"": _entry("", node)}
    if isinstance(node, eqx.nn.PReLU):
        slope = node.negative_slope
        return {"weight": _entry("negative_slope", slope, (slope.size,))}
    of = {name: _entry(name, array) for name, array in _affine(node).items()}
    if isinstance(node, eqx.nn.Conv | eqx.nn.ConvTranspose) and "bias" in of:
        of["bias"] = _entry("bias", node.bias, (node.out_channels,))
    if isinstance(node, eqx.nn.ConvTranspose) and "weight" in of:
        of["weight"] = _transposed(node)
    if isinstance(node, BatchNorm):
        of |= {name: Entry(None, (node.input_size,), _as_is, _as_is) for name in STATISTICS}
    return of


def optional(node: Any) -> set[str]:
    """Returns what PyTorch may have of a layer, beside `entries`: the count of batches, and
    what `eqx.nn.Shared` keeps in another place here."""
    tied = {name for name in ("weight", "bias") if getattr(node, name, None) is not None}
    count = {COUNT} if isinstance(node, BatchNorm) else set[str]()
    return (tied - set(entries(node))) | count


def put(tree: Any, arrays: dict[str, dict[str, Any]], above: str = "") -> Any:
    """Returns the tree with new arrays: by path, then by field (`""` for an array itself)."""

    def replaced(path: str, node: Any) -> Any:
        path = joined(above, path)
        new = dict(arrays.get(path, {}))
        if "" in new:
            return new[""]
        activation: Any = getattr(node, "activation", None)
        if activation is not None:
            new["activation"] = put(activation, arrays, f"{path}.activation")
        fields = list(new)
        return eqx.tree_at(lambda n: [getattr(n, f) for f in fields], node, list(new.values()))

    return each(tree, _FOUND, replaced)


def stacked(node: Any) -> bool:
    """Returns whether a layer is several at once, as `eqx.filter_vmap` makes them."""
    of = _affine(node)
    if isinstance(node, eqx.nn.LayerNorm | eqx.nn.RMSNorm):
        return any(array.shape != tuple(node.shape) for array in of.values())
    rank = 1 if isinstance(node, eqx.nn.GroupNorm | BatchNorm) else 2
    if isinstance(node, eqx.nn.Conv | eqx.nn.ConvTranspose):
        rank = node.num_spatial_dims + 2
    return isinstance(node, LAYERS) and "weight" in of and of["weight"].ndim != rank


def family(node: Any) -> str | None:
    """Returns in which of `FAMILIES` a layer is; `None` for an array."""
    return next((name for name, kinds in FAMILIES.items() if isinstance(node, kinds)), None)


def family_there(group: Mapping[str, np.ndarray]) -> str | None:
    """Returns in which of `FAMILIES` a layer is that has these arrays in PyTorch."""
    if set(group) - set(NAMES):
        return None
    batch_norms, norms, linear, convolutions = FAMILIES
    if "running_mean" in group:
        return batch_norms
    if "weight" not in group:
        return None
    rank, bias = group["weight"].ndim, group.get("bias")
    if rank == 1 or (bias is not None and bias.ndim == rank):
        return norms
    return {2: linear}.get(rank, convolutions if rank > 2 else None)


def joined(above: str, path: str) -> str:
    return above + path if path.startswith("[") or not (above and path) else f"{above}.{path}"


def dotted(path: str) -> str:
    """Returns `layers[1].norm` as PyTorch writes it, `layers.1.norm`."""
    return re.sub(r"\[(?:'([^']*)'|(\d+))\]", r".\1\2", path).removeprefix(".")


def _affine(node: Any) -> dict[str, Any]:
    of = {name: getattr(node, name, None) for name in ("weight", "bias")}
    return {name: a for name, a in of.items() if isinstance(a, jax.Array | np.ndarray)}


def _as_is(array: np.ndarray) -> np.ndarray:
    return array


def _entry(field: str | None, here: Any, there: tuple[int, ...] | None = None) -> Entry:
    """Returns the entry of an array that PyTorch has in the same order, in another shape."""
    shape = here.shape if there is None else there
    return Entry(field, shape, lambda a: a.reshape(here.shape), lambda a: a.reshape(shape))


def _transposed(layer: eqx.nn.ConvTranspose) -> Entry:
    """Returns the weight's entry: here it is that of the convolution which is computed, from
    in to out channels; there that of the convolution whose transpose is computed."""

    def turned(weight: np.ndarray) -> np.ndarray:
        first, second, *kernel = weight.shape
        weight = np.flip(weight, tuple(range(2, weight.ndim)))
        weight = weight.reshape(layer.groups, first // layer.groups, second, *kernel)
        return weight.swapaxes(1, 2).reshape(second * layer.groups, -1, *kernel)

    shape = (layer.in_channels, layer.out_channels // layer.groups, *layer.kernel_size)
    return Entry("weight", shape, turned, turned)
