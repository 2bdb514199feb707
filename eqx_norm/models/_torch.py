"""Defines `from_torch` and `to_torch`: PyTorch's weights and statistics, here and back."""

from collections.abc import Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm._batch_norm import BatchNorm
from eqx_norm.strategies import Moments

from ._layers import entries, found, listed, located, name, state_of
from ._torch_layers import COUNT, MEAN, VARIANCE, Slot, layers_of, place
from ._torch_match import Names, TorchReport, key, match, prefixes

Model = TypeVar("Model")
State = TypeVar("State", bound=eqx.nn.State | None)


def from_torch(
    model: Model,
    state: State,
    state_dict: Mapping[str, Any],
    names: Names = None,
    *,
    strict: bool = True,
) -> tuple[Model, State, TorchReport]:
    r"""Returns the model and its state with the weights and statistics of a PyTorch model.

    ```python
    state_dict = torch.load("model.pt", weights_only=True)  # tensors, or NumPy's arrays
    model, state, report = from_torch(model, state, state_dict, {"head": "fc"})
    ```

    A `state_dict` holds no settings. To train on as PyTorch does, make `BatchNorm` with
    `approach="batch"`, `unbiased=True` and a `momentum` of 1 minus PyTorch's; where PyTorch's
    is `None`, with `approach=eqx_norm.strategies.Average()`. `eps` is 1e-5 in both.

    **Which layer is which** is said by `names`: a mapping from our paths, `layers[1].norm`, or
    what they begin with, to PyTorch's prefixes, `layer1.0.bn1`; or a function of the path. So
    `{"": "module"}` is for a `DataParallel`, and `{"head": None}` leaves the head as it is. Of
    layers that it says nothing of, those of the same name there are the same; and what then is
    left on both sides goes by order, among layers whose arrays have the same names and shapes.

    **What is loaded:** `BatchNorm` and `LayerNorm`; of Equinox `LayerNorm`, `GroupNorm`,
    `RMSNorm`, `Linear`, `Embedding`, `Conv`, `ConvTranspose` (their weights are laid out
    differently) and `PReLU`; and arrays in none of these, by name. Arrays keep the dtype that
    they have here; statistics are float32 or better.

    **Statistics** are loaded as they stand, and are not debiased: those of an untrained layer,
    a mean of 0 and a variance of 1, count like any other when it is trained on, as they do in
    PyTorch. `accepted_index` becomes `num_batches_tracked`, or 0 where there is none.

    **Arguments:**

    - `model`: a layer or a model. An `eqx.nn.BatchNorm` in it must have been swapped.
    - `state`: its state, which stays valid; may be `None` where there is no `BatchNorm`.
    - `state_dict`: PyTorch's, of tensors on any device, NumPy's or JAX's arrays.
    - `names`: above.
    - `strict`: whether it is an error if something is left over, on either side. Another shape
        is an error in any case.

    **Returns:** the model, the state, and a `TorchReport`, which prints as a table.

    **Raises:** `ValueError` which lists all that does not fit; then nothing was loaded.
    """
    given, problems = _arrays(state_dict)
    report, slots = match(layers_of(model, state), given, names)
    arrays = dict[str, jax.Array]()
    for k, slot in slots:
        array, dtype = given[k], slot.array.dtype
        if array.shape != slot.shape:
            problems.append(f"{k} has the shape {array.shape}, and here {slot.shape}")
        elif np.iscomplexobj(array) and not jnp.issubdtype(dtype, jnp.complexfloating):
            problems.append(f"{k} is {array.dtype}, and here {dtype}, without imaginary part")
        else:
            arrays[slot.path] = _cast(k, slot.here(array), dtype, problems)
    learnt = dict[Any, Any]()
    for path, norm in {} if problems else found(model, BatchNorm).items():
        if place(path, MEAN) in arrays and place(path, VARIANCE) in arrays:
            mean, variance = (arrays[place(path, what)] for what in (MEAN, VARIANCE))
            with located(path, norm):
                learnt[norm.memory_index.marker] = norm.approach.load(
                    Moments.of(mean, variance)
                )
            learnt[norm.accepted_index.marker] = arrays.get(place(path, COUNT), jnp.int32(0))
            learnt[norm.rejected_index.marker] = jnp.int32(0)
    said = [listed(problems, "\n    ")] if problems else []
    if strict and report.leftovers:
        said += [
            *report.leftovers,
            "Say what is what by names=, or leave these by strict=False.",
        ]
    if said:
        raise ValueError("\n    ".join(["Nothing was loaded:", *said]))
    model = jax.tree_util.tree_map_with_path(lambda p, leaf: arrays.get(name(p), leaf), model)
    after: Any = None if state is None else state_of(model, entries(state) | learnt)
    return model, after, report


def to_torch(
    model: Any, state: eqx.nn.State | None = None, names: Names = None
) -> dict[str, np.ndarray]:
    """Returns the weights and statistics of a model as PyTorch's `state_dict` has them.

    ```python
    state_dict = {k: torch.from_numpy(v) for k, v in to_torch(model, state).items()}
    ```

    The running mean and variance are those that inference uses here, whatever the approach;
    before any batch they are 0 and 1. `num_batches_tracked` is the number of batches that the
    memory has taken in. What `from_torch` has loaded comes back to the bit.

    **Arguments:**

    - `model`: a layer or a model, of the layers that `from_torch` knows. Arrays in none of
        these are written, too.
    - `state`: its state; may be `None` where there is no `BatchNorm`.
    - `names`: PyTorch's prefixes, as for `from_torch`; where it says nothing, our paths with
        dots, `layers.1.norm`. A layer whose name is `None` is left out.

    **Returns:** NumPy arrays by PyTorch's names. What PyTorch's NumPy does not have, bfloat16
    for example, is float32.

    **Raises:** `ValueError` if two layers have one name, or the state is not the model's.
    """
    layers, state_dict = layers_of(model, state), dict[str, np.ndarray]()
    for path, prefix in prefixes(layers, names).items():
        slots = {} if prefix is None else layers[path]
        arrays = {key(prefix or "", n): _portable(slot) for n, slot in slots.items()}
        if both := sorted(arrays.keys() & state_dict.keys()):
            raise ValueError(
                f"{path!r} and another layer have one name: both would write {both}. Give "
                "each a name of its own by names=."
            )
        state_dict |= arrays
    return state_dict


def _arrays(state_dict: Any) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the arrays of a `state_dict`, and what is wrong with its other entries."""
    if not isinstance(state_dict, Mapping):
        has = callable(getattr(state_dict, "state_dict", None))
        raise ValueError(
            f"A {type(state_dict).__name__} was given as the state_dict. Give "
            + ("what its .state_dict() returns." if has else "a mapping of names to arrays.")
        )
    given, problems = dict[str, np.ndarray](), list[str]()
    for each, value in state_dict.items():
        try:
            array = _array(value)
        except Exception as error:  # of a tensor that is sparse, or has no values
            problems.append(f"{each!r} cannot be read: {error}")
            continue
        if isinstance(each, str) and array.dtype.kind in "biufcV":
            given[each] = array
            continue
        checkpoint = f", or give checkpoint[{each!r}]" if isinstance(value, Mapping) else ""
        what = f"{type(value).__name__} by the name of {each!r}"
        problems.append(
            f"a {what} is no array with a str for its name: leave it out{checkpoint}"
        )
    return given, problems


def _array(value: Any) -> np.ndarray:
    """Returns a tensor, or what else it is, as a NumPy array; torch is not imported."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        # NumPy has no bfloat16.
        value = (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()
    return np.asarray(value)


def _cast(key: str, array: np.ndarray, dtype: Any, problems: list[str]) -> jax.Array:
    """Returns the array in another dtype; notes what is no statistic."""
    what = key.rpartition(".")[2]
    if what == COUNT:
        if not 0 <= array < np.inf:
            problems.append(f"{key} is {array}, and no number of batches")
            return jnp.int32(0)
        return jnp.int32(min(int(array), np.iinfo(np.int32).max))
    with np.errstate(over="ignore"):
        # A copy, which PyTorch's later steps in place do not reach.
        new = jnp.asarray(array.astype(dtype, order="C"))
    may_be_infinite = what not in (MEAN, VARIANCE) and not np.isfinite(array).all()
    if not (may_be_infinite or jnp.isfinite(new).all()):
        problems.append(f"{key} is not finite in {dtype}")
    if what == VARIANCE and (new < 0).any():
        problems.append(f"{key} is negative")
    return new


def _portable(slot: Slot) -> np.ndarray:
    """Returns a copy that `torch.from_numpy` takes: writeable, and in an order of its own."""
    array = slot.there(np.asarray(slot.array))
    return np.array(array, np.float32 if array.dtype.kind == "V" else None, order="C")
