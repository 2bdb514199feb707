"""Lists the arrays of a model with their names and layouts in PyTorch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from eqx_norm import _memory
from eqx_norm._batch_norm import BatchNorm

from ._layers import located, name, remembered_by
from ._reconfigure import batches_of

_CONVS = (eqx.nn.Conv, eqx.nn.ConvTranspose)
_NORMS = (eqx.nn.BatchNorm, eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm)
_KNOWN = (*_CONVS, *_NORMS, eqx.nn.PReLU, eqx.nn.Linear, eqx.nn.Embedding)
# PyTorch's names of the fields of these layers, and of the statistics of a batch norm.
_FIELDS = {"weight": "weight", "bias": "bias", "negative_slope": "weight"}
MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"
_ENSEMBLE = "it belongs to an ensemble: convert the members one by one, then stack them."


class Slot(NamedTuple):
    """Holds an array, its place, and conversions from PyTorch's layout and back."""

    path: str
    array: Any
    here: Callable[[np.ndarray], np.ndarray] = np.asarray
    there: Callable[[np.ndarray], np.ndarray] = np.asarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the array's shape in PyTorch."""
        return self.there(np.empty(self.array.shape, bool)).shape


# By the path of a layer, then by PyTorch's name; an array outside of layers has the name "".
Layers = dict[str, dict[str, Slot]]


def layers_of(model: Any, state: eqx.nn.State | None) -> Layers:
    """Returns all arrays that PyTorch may have, in layers and outside of them.

    **Raises:** `ValueError` for a batch norm that cannot be converted.
    """
    layers = Layers()
    for path, leaf in jtu.tree_leaves_with_path(model):
        depth, node = _innermost(model, path)
        owner, field = name(path[:depth]), name(path[depth:])
        if isinstance(node, eqx.nn.BatchNorm) and owner not in layers:
            with located(owner, node):
                layers[owner] = _statistics(owner, node, state)
        if not eqx.is_inexact_array(leaf):
            continue
        if node is None or field not in _FIELDS:
            layers[name(path)] = {"": Slot(name(path), leaf)}
        else:
            with located(owner, node):
                slot = Slot(name(path), leaf, *_layouts(node, field, leaf.shape))
            layers.setdefault(owner, {})[_FIELDS[field]] = slot
    return layers


def place(norm: str, what: str) -> str:
    """Returns the place of a statistic, which is in the state and has no path in the model."""
    return f"{norm} {what}"


def _statistics(path: str, norm: Any, state: eqx.nn.State | None) -> dict[str, Slot]:
    if not isinstance(norm, BatchNorm):
        raise ValueError(
            "it is an eqx.nn.BatchNorm: convert it first by eqx_norm.models.swap(model, state)."
        )
    if state is None:
        raise ValueError("its statistics are in the model's state: pass state, too.")
    remembered, _ = remembered_by(norm, state)
    memory = remembered["memory_index"]
    batches = batches_of(memory)
    if batches.ndim:
        raise ValueError(_ENSEMBLE)
    _memory.check(memory.statistics, norm.approach, norm.input_size)
    used = norm.approach.infer(memory.statistics)
    arrays = {MEAN: used.mean, VARIANCE: used.variance, COUNT: np.array(batches, np.int64)}
    return {what: Slot(place(path, what), array) for what, array in arrays.items()}


def _innermost(node: Any, path: Any) -> tuple[int, Any]:
    """Returns the number of keys to the innermost layer around a leaf, and the layer."""
    innermost = 0, None
    for depth, key in enumerate(path):
        if isinstance(node, _KNOWN):
            innermost = depth, node
        match key:
            case jtu.GetAttrKey(name=attribute):
                node = getattr(node, attribute)
            case jtu.SequenceKey(idx=index) | jtu.DictKey(key=index):
                node = cast(Any, node)[index]
            case _:  # a node of an unknown class
                break
    return innermost


def _layouts(layer: Any, field: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns functions that convert an array of a layer from PyTorch's layout, and back."""
    rank = layer.num_spatial_dims + 2 if isinstance(layer, _CONVS) else 2
    if isinstance(layer, _NORMS):
        rank = len(getattr(layer, "shape", (None,)))
    if field == "weight" and len(shape) != rank:
        raise ValueError(_ENSEMBLE)
    if isinstance(layer, eqx.nn.ConvTranspose) and field == "weight":
        turned = functools.partial(_turned, layer.groups)
        return turned, turned
    # The bias of a convolution has spatial axes, too; PReLU's slope may have any shape.
    is_flat = isinstance(layer, eqx.nn.PReLU) or (isinstance(layer, _CONVS) and field == "bias")
    return (lambda a: a.reshape(shape)), (lambda a: a.reshape(-1) if is_flat else a)


def _turned(groups: int, weight: np.ndarray) -> np.ndarray:
    """Converts the weight of a transposed convolution, either way. Equinox stores the weight of
    the convolution it computes, PyTorch of the convolution whose transpose it computes."""
    first, second, *kernel = weight.shape
    weight = np.flip(weight, tuple(range(2, weight.ndim)))
    weight = weight.reshape(groups, first // groups, second, *kernel)
    return weight.swapaxes(1, 2).reshape(second * groups, -1, *kernel)
