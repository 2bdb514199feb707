"""Defines `from_torch` and `to_torch`: PyTorch's weights and statistics, here and back."""

from collections.abc import Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm import _memory
from eqx_norm._batch_norm import BatchNorm
from eqx_norm.strategies import Moments

from ._layers import entries as held_by
from ._torch_layers import COUNT, STATISTICS, entries, items, put, stacked
from ._torch_names import Names, TorchReport, key, match, prefixes, refusal

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

    For one layer, or for a model of any number of them:

    ```python
    import equinox as eqx
    import numpy as np
    from eqx_norm import BatchNorm
    from eqx_norm.models import from_torch

    # What torch.nn.BatchNorm2d(3, momentum=0.1).state_dict() holds, tensors or NumPy arrays.
    state_dict = {
        "weight": np.ones(3),
        "bias": np.zeros(3),
        "running_mean": np.array([0.1, 0.2, 0.3]),
        "running_var": np.array([1.0, 2.0, 3.0]),
        "num_batches_tracked": np.array(500),
    }
    make = eqx.nn.make_with_state(BatchNorm)
    norm, state = make(3, "batch", approach="batch", momentum=0.9, unbiased=True)
    norm, state, report = from_torch(norm, state, state_dict)
    ```

    A `state_dict` holds no settings. To train on as PyTorch does, make `BatchNorm` with
    `approach="batch"`, `unbiased=True` and a `momentum` of 1 minus PyTorch's; where PyTorch's
    is `None`, with `approach=eqx_norm.strategies.Average()`. `eps` is 1e-5 in both.

    **Which layer is which** is said by `names`, from our paths, `layers[1].norm`, to PyTorch's
    prefixes, `layer1.0.bn1`:

    - a mapping, of whole paths or of what they begin with; the rest of a path is taken over
        with dots. So `{}` is for models whose names are the same, `{"": "module"}` for a
        `DataParallel`, and `{"head": None}` leaves the head as it is, whatever there is for it;
    - a function of the path, for example `lambda path: path.replace(".layers[", "[")` for
        `eqx.nn.Sequential`, whose layers have no name in PyTorch;
    - `None`, by the order of layers: the k-th batch norm is the k-th batch norm there, and so
        are the k-th of the other norms (and PReLU), of linear layers (and embeddings), and of
        convolutions. Of each of these four there must be equally many.

    **What is loaded:** `BatchNorm` and `LayerNorm`; of Equinox `LayerNorm`, `GroupNorm`,
    `RMSNorm`, `Linear`, `Embedding`, `Conv`, `ConvTranspose` (their weights are laid out
    differently) and `PReLU`. An array that is in none of these is loaded from an entry that
    `names`, or its own path, names, and which has its shape. Arrays keep the dtype that they
    have here; statistics are float32 or better.

    **Statistics** are loaded as they stand, and are not debiased: those of an untrained layer,
    a mean of 0 and a variance of 1, count like any other when it is trained on, as they do in
    PyTorch. `accepted_index` becomes `num_batches_tracked`, or 0 where there is none.

    **Arguments:**

    - `model`: a layer or a model. An `eqx.nn.BatchNorm` in it must have been swapped.
    - `state`: its state, which stays valid; may be `None` where there is no `BatchNorm`.
    - `state_dict`: PyTorch's, of tensors on any device, NumPy's or JAX's arrays.
    - `names`: above.
    - `strict`: whether it is an error if something is left over, on either side. A layer of
        which a part is missing or has another shape is an error in any case.

    **Returns:** the model, the state, and a `TorchReport`, which prints as a table.

    **Raises:** `ValueError` which lists all that does not fit; then nothing was loaded.
    """
    given = {name: _array(name, value) for name, value in _checked(state_dict).items()}
    layers = _layers(model, state)
    matched = match(layers, given, names)
    if problem := refusal(matched, strict):
        raise ValueError(problem)
    arrays: dict[str, dict[str, Any]] = {}
    learnt: list[tuple[eqx.nn.StateIndex[Any], Any]] = []
    for path, prefix in matched.report.matched.items():
        node = layers[path]
        for name, entry in entries(node).items():
            if entry.field is not None:
                old = getattr(node, entry.field) if entry.field else node
                new = _cast(key(prefix, name), entry.here(given[key(prefix, name)]), old.dtype)
                arrays.setdefault(path, {})[entry.field] = new
        if isinstance(node, BatchNorm) and state is not None:
            mean, variance = (given[key(prefix, name)] for name in STATISTICS)
            count = given.get(key(prefix, COUNT))
            learnt += _learnt(node, state, prefix, mean, variance, count)
    after: Any = None
    if state is not None:
        # A state that was set is used up: this one is a copy, the user's stays valid.
        held = held_by(state)
        after = eqx.nn.State.tree_unflatten(tuple(held), tuple(held.values()))
        for index, value in learnt:
            after = after.set(index, value)
    return put(model, arrays), after, matched.report


def to_torch(
    model: Any, state: eqx.nn.State | None = None, names: Names = None
) -> dict[str, np.ndarray]:
    """Returns the weights and statistics of a model as PyTorch's `state_dict` has them.

    ```python
    import equinox as eqx
    from eqx_norm import BatchNorm
    from eqx_norm.models import to_torch

    norm, state = eqx.nn.make_with_state(BatchNorm)(3, "batch", approach="batch")
    state_dict = to_torch(norm, state)
    # torch_norm.load_state_dict({k: torch.from_numpy(v) for k, v in state_dict.items()})
    ```

    The running mean and variance are those that inference uses here, whatever the approach;
    before any batch they are 0 and 1. `num_batches_tracked` is the number of batches that the
    memory has taken in. What `from_torch` has loaded comes back to the bit.

    **Arguments:**

    - `model`: a layer or a model, of the layers that `from_torch` knows. Arrays in none of
        these are written, too.
    - `state`: its state; may be `None` where there is no `BatchNorm`.
    - `names`: PyTorch's prefixes, as for `from_torch`; unless given, our paths with dots,
        `layers.1.norm`. A layer whose name is `None` is left out.

    **Returns:** NumPy arrays by PyTorch's names. What PyTorch's NumPy does not have, bfloat16
    for example, is float32.

    **Raises:** `ValueError` if two layers have one name, or the state is not the model's.
    """
    layers = _layers(model, state)
    state_dict: dict[str, np.ndarray] = {}
    for path, prefix in prefixes(layers, names if names is not None else {}).items():
        if prefix is None:
            continue
        node, found = layers[path], {}
        for name, entry in entries(node).items():
            if entry.field is not None:
                held = getattr(node, entry.field) if entry.field else node
                found[key(prefix, name)] = _portable(entry.there(np.asarray(held)))
        if isinstance(node, BatchNorm) and state is not None:
            used = node.approach.infer(state.get(node.memory_index))
            count = np.asarray(state.get(node.accepted_index))
            remembered = zip(STATISTICS, (used.mean, used.variance), strict=True)
            found |= {key(prefix, name): _portable(value) for name, value in remembered}
            found[key(prefix, COUNT)] = np.array(count, np.int64)
        if both := sorted(found.keys() & state_dict.keys()):
            raise ValueError(
                f"{path!r} and another layer have one name: both would write {both}. Give "
                "each a name of its own by names=."
            )
        state_dict |= found
    return state_dict


def _layers(model: Any, state: eqx.nn.State | None) -> dict[str, Any]:
    """Returns layers and arrays by path; raises where one of them cannot be translated."""
    layers = dict(items(model))
    norms = {path: node for path, node in layers.items() if isinstance(node, BatchNorm)}
    theirs = [path for path, node in layers.items() if isinstance(node, eqx.nn.BatchNorm)]
    if others := [path for path in theirs if path not in norms]:
        raise ValueError(
            f"{others} are layers of eqx.nn.BatchNorm, whose statistics have another form. Put "
            "ours in their place first: model, state = eqx_norm.models.swap(model, state)."
        )
    if norms and state is None:
        raise ValueError(
            f"{list(norms)} keep their statistics in the model's state: give it, as "
            "eqx.nn.make_with_state returned it beside the model."
        )
    several = [path for path, node in layers.items() if stacked(node)]
    for path, norm in norms.items():
        if state is not None and path not in several:
            count = _count(norm, state)
            if count.ndim:
                several.append(path)
            else:
                _memory.recall(state, norm.memory_index, norm.approach, norm.input_size)
    if several:
        raise ValueError(
            f"{several} are several layers at once, as eqx.filter_vmap makes them, and "
            "PyTorch's state_dict is of one model. Translate the members one by one, and "
            "stack them afterwards: jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)."
        )
    return layers


def _count(norm: BatchNorm, state: eqx.nn.State) -> Any:
    try:
        return state.get(norm.accepted_index)
    except KeyError:  # said in words by `recall`
        return np.zeros(())


def _learnt(
    norm: BatchNorm,
    state: eqx.nn.State,
    prefix: str,
    mean: np.ndarray,
    variance: np.ndarray,
    count: np.ndarray | None,
) -> list[tuple[eqx.nn.StateIndex[Any], Any]]:
    """Returns what a layer's indices are to hold."""
    is_complex = any(map(jnp.iscomplexobj, jax.tree.leaves(state.get(norm.memory_index))))
    dtype = _memory.statistics_dtype(complex if is_complex else float)
    real = _memory.statistics_dtype(float)
    of_mean, of_variance = (key(prefix, name) for name in STATISTICS)
    moments = Moments.of(_cast(of_mean, mean, dtype), _cast(of_variance, variance, real))
    accepted = 0 if count is None else min(int(count), np.iinfo(np.int32).max)
    return [
        (norm.memory_index, norm.approach.load(moments)),
        (norm.accepted_index, jnp.asarray(accepted, jnp.int32)),
        (norm.rejected_index, jnp.zeros((), jnp.int32)),
    ]


def _checked(state_dict: Any) -> Mapping[str, Any]:
    if not isinstance(state_dict, Mapping):
        has = callable(getattr(state_dict, "state_dict", None))
        raise ValueError(
            f"A {type(state_dict).__name__} was given as the state_dict. Give "
            + ("what its .state_dict() returns." if has else "a mapping of names to arrays.")
        )
    return state_dict


def _array(name: str, value: Any) -> np.ndarray:
    """Returns a tensor, or what else it is, as a NumPy array; torch is not imported."""
    if isinstance(value, Mapping):
        raise ValueError(
            f"{name!r} in the state_dict is a mapping itself: this is a checkpoint. Give "
            f"checkpoint[{name!r}], or whichever of its entries is the state_dict."
        )
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        try:
            value = tensor.numpy()
        except TypeError:  # NumPy has no bfloat16
            value = tensor.float().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biufcV":
        raise ValueError(f"{name!r} in the state_dict is no array but {value!r}: leave it out.")
    return array


def _cast(name: str, array: np.ndarray, dtype: Any) -> jax.Array:
    if np.iscomplexobj(array) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"{name!r} in the state_dict is {array.dtype}, but here it is {dtype}, which has "
            f"no imaginary part. Make the layer with dtype=jnp.complex64."
        )
    # A copy, which PyTorch's later steps in place do not reach.
    return jnp.asarray(array.astype(dtype, order="C"))


def _portable(array: Any) -> np.ndarray:
    """Returns a copy that `torch.from_numpy` takes: writeable, and in an order of its own."""
    array = np.asarray(array)
    return np.array(array, np.float32 if array.dtype.kind == "V" else None, order="C")
