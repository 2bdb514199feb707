"""Lists the arrays of a model with their names and layouts in PyTorch."""

from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from eqx_norm import _memory
from eqx_norm._batch_norm import BatchNorm

from ._carry import batches_of
from ._layers import located, path_of

_CONVS = (eqx.nn.Conv, eqx.nn.ConvTranspose)
_NORMS = (eqx.nn.BatchNorm, eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm)
_KNOWN = (*_CONVS, *_NORMS, eqx.nn.PReLU, eqx.nn.Linear, eqx.nn.Embedding)
# PyTorch's names of the fields of these layers, and of the statistics of a batch norm.
_FIELDS = {"weight": "weight", "bias": "bias", "negative_slope": "weight"}
MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"
_ENSEMBLE = "it belongs to an ensemble: convert the members one by one, then stack them."


class Slot(NamedTuple):
    """Holds an array, and converts its layout from PyTorch's and to it.

    **Fields:** `path`: of the array in the model, or a name of a statistic, which is in the
    state; `is_flat`: whether PyTorch's array has one axis; `groups`: those of a transposed
    convolution, for its weight.
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
        """Converts the weight of a transposed convolution, either way: Equinox stores that of
        the convolution it computes, PyTorch of the one whose transpose it computes."""
        if self.groups is None:
            return weight
        first, second, *kernel = weight.shape
        weight = np.flip(weight, tuple(range(2, weight.ndim)))
        weight = weight.reshape(self.groups, first // self.groups, second, *kernel)
        return weight.swapaxes(1, 2).reshape(second * self.groups, -1, *kernel)


# By the path of a layer, then by PyTorch's name; an array outside of layers has the name "".
Slots = dict[str, dict[str, Slot]]


def slots_of(model: Any, state: eqx.nn.State | None, above: jtu.KeyPath = ()) -> Slots:
    """Returns all arrays that PyTorch may have, in layers and outside of them."""
    slots, owner = Slots(), path_of(above)

    def is_inner(node: Any) -> bool:
        return node is not model and isinstance(node, _KNOWN)

    for below, node in jtu.tree_leaves_with_path(model, is_leaf=is_inner):
        path, field = path_of((*above, *below)), path_of(below)
        if is_inner(node):
            slots |= slots_of(node, state, (*above, *below))
        elif eqx.is_inexact_array(node) and isinstance(model, _KNOWN) and field in _FIELDS:
            with located(owner, model):
                slots.setdefault(owner, {})[_FIELDS[field]] = _slot(path, model, field, node)
        elif eqx.is_inexact_array(node):
            slots[path] = {"": Slot(path, node)}
    if isinstance(model, eqx.nn.BatchNorm):
        with located(owner, model):
            slots[owner] = slots.get(owner, {}) | _statistics(owner, model, state)
    return slots


def _statistics(path: str, norm: Any, state: eqx.nn.State | None) -> dict[str, Slot]:
    if not isinstance(norm, BatchNorm):
        raise ValueError(
            "it is an eqx.nn.BatchNorm: convert it first by eqx_norm.models.swap(model, state)."
        )
    if state is None:
        raise ValueError("its statistics are in the model's state: pass state, too.")
    memory = _memory.recall(state, norm.memory_index, norm.approach, norm.input_size)
    moments = norm.approach.infer(memory.statistics)
    count = np.array(batches_of(norm, memory), np.int64)
    arrays = {MEAN: moments.mean, VARIANCE: moments.variance, COUNT: count}
    return {name: Slot(f"{path} {name}", array) for name, array in arrays.items()}


def _slot(path: str, layer: Any, field: str, array: Any) -> Slot:
    rank = layer.num_spatial_dims + 2 if isinstance(layer, _CONVS) else 2
    if isinstance(layer, _NORMS):
        rank = len(getattr(layer, "shape", (None,)))
    if field == "weight" and array.ndim != rank:
        raise ValueError(_ENSEMBLE)
    if isinstance(layer, eqx.nn.ConvTranspose) and field == "weight":
        return Slot(path, array, groups=layer.groups)
    # The bias of a convolution has spatial axes, too; PReLU's slope may have any shape.
    is_bias = isinstance(layer, _CONVS) and field == "bias"
    return Slot(path, array, is_flat=is_bias or isinstance(layer, eqx.nn.PReLU))
