"""Converts weights and statistics from PyTorch, by `from_torch`, and back, by `to_torch`."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Shaped

from eqx_norm import _contract, _memory
from eqx_norm._batch_norm import BatchNorm
from eqx_norm._instance_norm import InstanceNorm
from eqx_norm._memory import Remembered
from eqx_norm.strategies import Moments

from . import _layers
from ._carry import checked_values
from ._layers import Entries, Model, State, layers_of
from ._torch_layers import COUNT, MEAN, VARIANCE, Names, Slot, TorchReport, match


def from_torch(
    model: Model,
    state: State,
    state_dict: Mapping[str, object],
    names: Names = None,
    *,
    strict: bool = True,
    values: ArrayLike | None = None,
) -> tuple[Model, State, TorchReport]:
    r"""Returns the model and its state with weights and statistics of a PyTorch model.

    ```python
    state_dict = torch.load("model.pt", weights_only=True)  # tensors, or NumPy's arrays
    model, state, report = from_torch(model, state, state_dict, {"head": "fc"})
    ```

    A `state_dict` holds no settings. To continue training as in PyTorch, make `BatchNorm` with
    `approach="batch"`, `unbiased=True` and a `momentum` of 1 minus PyTorch's. Weights are
    copied as they are stored: make the layers of a model that multiplies by `1 + weight`, such
    as Gemma, with `weight_offset=1.0`.

    **Layers are matched** by equal names, such as `layers[1].norm` and `layers.1.norm`, unless
    `names` says otherwise: a mapping from paths (`layers[1].norm`) or their beginnings to
    PyTorch's prefixes (`layer1.0.bn1`), or a function from a path to a prefix. For a
    `DataParallel` pass `{"": "module"}`; `{"head": None}` leaves the head unchanged.

    **Layers that can be loaded** are the norms of this package; Equinox's `LayerNorm`,
    `GroupNorm`, `RMSNorm`, `Linear`, `Embedding`, `Conv`, `ConvTranspose` (whose weight has
    another layout) and `PReLU`. Arrays outside of these layers are loaded by name. Arrays keep
    the dtype of the model; statistics are float32 or better.

    **Statistics** are loaded without debiasing: as in PyTorch, further training averages the
    mean of 0 and variance of 1 of an untrained layer like other statistics. The count of
    accepted batches becomes `num_batches_tracked`, or 0 if there is none. (With 0, `Average`
    lets the next batch replace the statistics, as PyTorch does.) PyTorch does not store how
    many values they stand for, by which `Cumulative` weighs: give it as `values`.

    **Arguments:**

    - `model`: a layer or a model, without `eqx.nn.BatchNorm`s: `swap` them first.
    - `state`: its state, which stays valid; may be `None` if the model has no `BatchNorm`.
    - `state_dict`: PyTorch's: tensors on any device, or arrays of NumPy or JAX, by name.
    - `names`: see above.
    - `strict`: whether unmatched entries on either side are an error. A wrong shape always is,
        and so is a `state_dict` in which no layer is found.
    - `values`: the number of values per channel that the running statistics stand for; `None`
        if it is not known. With it, statistics are loaded up to rounding, else to the bit.

    **Returns:** the model, the state, and a `TorchReport`, which prints as a table.

    **Raises:** `ValueError`, which lists everything that does not fit.
    """
    _layers.check_untraced(model, state, state_dict)
    arrays, problems = _arrays(state_dict)
    report, keyed = match(model, state, arrays, names)
    loaded = dict[str, Shaped[Array, "..."]]()
    for key, slot in keyed:
        if key in arrays:
            try:
                loaded[slot.path] = _loaded(key, arrays[key], slot)
            except ValueError as error:
                problems.append(str(error))
    learnt = {} if problems else _loaded_statistics(model, state, loaded, values)
    lines = [_layers.listed(problems, "\n    ")] if problems else []
    if report.leftovers and (strict or not report.matched):
        fixes = ['match them by a mapping, such as names={"head": "fc"}']
        has_means = any(key.endswith(MEAN) for key in report.unexpected)
        if has_means and layers_of(model, InstanceNorm):
            fixes.append("load an InstanceNorm's statistics into the layer of docs/own_norm.md")
        if strict:
            fixes.append("leave them out by strict=False")
        lines += [*report.leftovers, f"You can {'; or '.join(fixes)}."]
    if lines:
        raise ValueError("\n    ".join(["Nothing was loaded:", *lines]))
    model = _layers.with_nodes(model, loaded)
    return model, _layers.with_entries(model, state, learnt), report


def _loaded_statistics(
    model: Any,
    state: eqx.nn.State | None,
    loaded: Mapping[str, Shaped[Array, "..."]],
    values: ArrayLike | None,
) -> Entries:
    """Returns the entries of the norms whose running mean and variance were loaded."""
    learnt = Entries()
    for path, norm in layers_of(model, BatchNorm).items():
        mean, variance = loaded.get(f"{path}.{MEAN}"), loaded.get(f"{path}.{VARIANCE}")
        if mean is None or variance is None:
            continue
        with _layers.located(path, norm):
            before = _memory.recall(norm, state).statistics
            count = None if values is None else checked_values(values, (), norm.input_size)
            moments = Moments.of(mean, variance, count, int(norm.unbiased))
            memory = _contract.load(norm.approach, moments, before)
        counts = jnp.asarray([loaded.get(f"{path}.{COUNT}", 0), 0], jnp.int32)
        learnt[norm.memory_index.marker] = Remembered(memory, counts)
    return learnt


def to_torch(
    model: Any, state: eqx.nn.State | None = None, names: Names = None
) -> dict[str, np.ndarray]:
    """Returns the weights and statistics of a model as a `state_dict` for PyTorch.

    ```python
    state_dict = {k: torch.from_numpy(v) for k, v in to_torch(model, state).items()}
    ```

    The running mean and variance are those that inference uses, whatever the approach; before
    any batch they are 0 and 1. `num_batches_tracked` is the number of accepted batches. Arrays
    from `from_torch` are returned bitwise equal. Weights are copied without `weight_offset`:
    PyTorch's own layers need `reconfigure(model, state, weight_offset=0.0)` first.

    **Arguments:**

    - `model`: a layer or a model, as for `from_torch`.
    - `state`: its state; may be `None` if the model has no `BatchNorm`.
    - `names`: PyTorch's prefixes, such as the `report.matched` of `from_torch`. Other layers
        get their path with dots, `layers.1.norm`. A layer whose name is `None` is left out.

    **Returns:** NumPy arrays by PyTorch's names, in PyTorch's layout. Arrays of a dtype that
    NumPy lacks, such as bfloat16, become float32.

    **Raises:** `ValueError` if two layers have the same name, or for a state of another model.
    """
    _layers.check_untraced(model, state)
    state_dict = dict[str, np.ndarray]()
    for key, slot in match(model, state, {}, names)[1]:
        if key in state_dict:
            raise ValueError(
                f"{slot.path!r} and another array would both be {key!r}. Give their layers "
                "different names by names=."
            )
        # `torch.from_numpy` requires writeable and contiguous arrays.
        array = slot.to_torch(np.asarray(slot.array))
        dtype = np.float32 if array.dtype.kind == "V" else None
        state_dict[key] = np.array(array, dtype, order="C")
    return state_dict


def _arrays(state_dict: object) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the arrays of a `state_dict`, and the problems of its other entries."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"state_dict is a {type(state_dict).__name__}. Pass a mapping of names to arrays, "
            "as module.state_dict() returns."
        )
    arrays, problems = dict[str, np.ndarray](), list[str]()
    for key, value in state_dict.items():
        if hasattr(value, "detach"):  # a tensor; NumPy has no bfloat16
            tensor = value.detach().cpu()
            value = (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()
        array = np.asarray(value)
        if array.dtype.kind in "biufcV":
            arrays[str(key)] = array
        else:
            problems.append(
                f"{key!r} is a {type(value).__name__}, not an array: leave it out. (If it "
                f"holds the arrays of a whole checkpoint, pass checkpoint[{key!r}].)"
            )
    return arrays, problems


def _loaded(key: str, array: Shaped[np.ndarray, "..."], slot: Slot) -> Shaped[Array, "..."]:
    """Converts PyTorch's array for the model; raises `ValueError` if the array does not fit."""
    if array.shape != slot.shape:
        raise ValueError(f"{key} has the shape {array.shape}, not {slot.shape} as here")
    if slot.statistic == COUNT and not _is_count(array):
        raise ValueError(
            f"{key} is {array}, not a whole number from 0 to 2**31 - 1. Leave it out of the "
            "state_dict, and the count is 0"
        )
    dtype = slot.array.dtype
    if array.dtype.kind == "c" and not jnp.iscomplexobj(slot.array):
        raise ValueError(f"{key} is {array.dtype}, whose imaginary part {dtype} cannot hold")
    with np.errstate(over="ignore"):
        # The array is copied, because PyTorch updates its arrays in place.
        new = jnp.asarray(slot.from_torch(array).astype(dtype, order="C"))
    must_be_finite = slot.statistic is not None or np.isfinite(array).all()
    if must_be_finite and not jnp.isfinite(new).all():
        raise ValueError(f"{key} is not finite in {dtype}")
    if slot.statistic == VARIANCE and (new < 0).any():
        raise ValueError(f"{key} is negative")
    return new


def _is_count(number: Shaped[np.ndarray, ""]) -> bool:
    if number.dtype.kind not in "iuf":
        return False
    return bool(0 <= number < 2**31) and float(number).is_integer()
