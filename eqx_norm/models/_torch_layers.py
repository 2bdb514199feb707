"""Lists the arrays of a model with their names and layouts in PyTorch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from eqx_norm import _memory
from eqx_norm._batch_norm import BatchNorm

from ._carry import batches_of
from ._layers import located, path_of as name, entries_of

_CONVS = (eqx.nn.Conv, eqx.nn.ConvTranspose)
_NORMS = (eqx.nn.BatchNorm, eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm)
_KNOWN = (*_CONVS, *_NORMS, eqx.nn.PReLU, eqx.nn.Linear, eqx.nn.Embedding)
# PyTorch's names of the fields of these layers, and of the statistics of a batch norm.
_FIELDS = {"weight": "weight", "bias": "bias", "negative_slope": "weight"}
MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"
_ENSEMBLE = "it belongs to an ensemble: convert the members one by one, then stack them."


class Slot(NamedTuple):
    """Holds an array, its place, and conversions from PyTorch's layout and to it."""

    path: str
    array: Any
    from_torch: Callable[[np.ndarray], np.ndarray] = np.asarray
    to_torch: Callable[[np.ndarray], np.ndarray] = np.asarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the array's shape in PyTorch."""
        return self.to_torch(np.empty(self.array.shape, bool)).shape


# By the path of a layer, then by PyTorch's name; an array outside of layers has the name "".
Slots = dict[str, dict[str, Slot]]


def slots_of(model: Any, state: eqx.nn.State | None, above: jtu.KeyPath = ()) -> Slots:
    """Returns all arrays that PyTorch may have, in layers and outside of them.

    **Raises:** `ValueError` for a batch norm that cannot be converted.
    """
    slots = Slots()
    owner, is_layer = name(above), isinstance(model, _KNOWN)
    with located(owner, model):
        if isinstance(model, eqx.nn.BatchNorm):
            slots[owner] = _statistics(owner, model, state)

    def is_inner(node: Any) -> bool:
        return node is not model and isinstance(node, _KNOWN)

    for below, leaf in jtu.tree_leaves_with_path(model, is_leaf=is_inner):
        path, field = name((*above, *below)), name(below)
        if is_inner(leaf):
            slots |= slots_of(leaf, state, (*above, *below))
        elif eqx.is_inexact_array(leaf) and is_layer and field in _FIELDS:
            with located(owner, model):
                slot = Slot(path, leaf, *_layouts(model, field, leaf.shape))
            slots.setdefault(owner, {})[_FIELDS[field]] = slot
        elif eqx.is_inexact_array(leaf):
            slots[path] = {"": Slot(path, leaf)}
    return slots


def place(norm: str, statistic: str) -> str:
    """Returns the place of a statistic, which is in the state and has no path in the model."""
    return f"{norm} {statistic}"


def _statistics(path: str, norm: Any, state: eqx.nn.State | None) -> dict[str, Slot]:
    if not isinstance(norm, BatchNorm):
        raise ValueError(
            "it is an eqx.nn.BatchNorm: convert it first by eqx_norm.models.swap(model, state)."
        )
    if state is None:
        raise ValueError("its statistics are in the model's state: pass state, too.")
    (memory,) = entries_of(norm, state)
    batches = batches_of(norm, memory)
    if batches.ndim:
        raise ValueError(_ENSEMBLE)
    _memory.check(memory.statistics, norm.approach, norm.input_size)
    moments = norm.approach.infer(memory.statistics)
    count = np.array(batches, np.int64)
    arrays = {MEAN: moments.mean, VARIANCE: moments.variance, COUNT: count}
    return {key: Slot(place(path, key), array) for key, array in arrays.items()}


def _layouts(layer: Any, field: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns functions that convert an array of a layer from PyTorch's layout, and to it."""
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
