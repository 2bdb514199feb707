"""Defines `recalibrate`, which computes running statistics anew in a pass over data."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from eqx_norm import _contract
from eqx_norm._batch_norm import BatchNorm
from eqx_norm._contract import described
from eqx_norm._memory import Remembered
from eqx_norm._warnings import stacklevel
from eqx_norm.strategies import Cumulative

from . import _layers
from ._carry import batches_of, carry, new_statistics
from ._layers import LINEAR, Entries, Nodes

Forward = Callable[[Any, eqx.nn.State, Any], object]


def recalibrate(
    model: Any,
    state: eqx.nn.State,
    batches: Iterable[Any],
    forward: Forward | None = None,
) -> eqx.nn.State:
    r"""Returns the state with running statistics computed anew from all data in `batches`.

    Let $n_k$, $\mu_k$ and $\sigma_k^2$ be the number of values in the $k$-th batch, their mean
    and their variance. The new running mean and variance of each batch norm are

    $$\mu = \frac{1}{n} \sum_k n_k \mu_k, \qquad
      \sigma^2 = \frac{1}{n - d} \sum_k n_k \left(\sigma_k^2 + (\mu_k - \mu)^2\right), \qquad
      n = \sum_k n_k,$$

    where $d = 1$ in a layer with `unbiased=True`, otherwise 0. These are the statistics of all
    values together, whatever the batch sizes (`strategies.Cumulative`).

    ```python
    state = recalibrate(model, state, tqdm(batches))
    ```

    During the pass each norm normalises a batch by the batch's own statistics, as in training.
    The inputs of later norms in a deep network, and so their statistics, depend on the batch
    size: use batches as large as in training.

    **Arguments:**

    - `model`: in training or inference mode. Its batch norms, except frozen ones, use batch
        statistics in both modes; other layers follow the mode (dropout is off in inference).
    - `state`: stays valid; only the entries of these batch norms change in the new state.
    - `batches`: any iterable, read once, so `tqdm(batches)` shows progress. It yields arrays
        whose first axis is the batch axis, or tuples `(x, ...)`, of which `x` is used; with
        `forward`, anything that `forward` takes.
    - `forward`: `forward(model, state, batch)` calls the model on a batch and returns the new
        state, alone or last in a tuple. The default is `jax.vmap(model, axis_name=...,
        in_axes=(0, None), out_axes=(0, None))(x, state)`. It is compiled once for each shape.

    **Returns:** the new state; the counts of accepted and rejected batches are continued.

    **Raises:** `ValueError` if there are no batches or no batch norms, if no batch norm got a
    finite batch, if a strategy cannot `load`, or for an ensemble without `forward`. As in
    training, a batch norm skips and counts batches whose statistics are not finite. A warning
    at the end reports them, and names the layers that got no finite batch and so keep their
    statistics.

    PyTorch's `torch.optim.swa_utils.update_bn` is similar, but weighs all batches equally and
    ignores the variance between their means. Wu and Johnson, "Rethinking 'Batch' in BatchNorm",
    https://arxiv.org/abs/2105.07576, call the method precise batch norm.
    """
    batches = _checked_batches(batches)
    _layers.check_function("forward", forward, f"of three arguments: {_FORWARD}")
    _layers.check_untraced(model, state)
    what = "eqx_norm.BatchNorm that is not frozen"
    norms = _layers.chosen(
        model, BatchNorm, None, "recalibrate", what, lambda norm: norm.approach.learns
    )
    is_mapped = forward is None
    if forward is None:
        axis_name = next(iter(norms.values())).axis_name
        axis_name = axis_name[0] if isinstance(axis_name, tuple) else axis_name
        # Partials of equal arguments are equal, so `_step` is compiled once.
        forward = jax.tree_util.Partial(_over_batch, axis_name)
        batches = map(_first, batches)

    def pooling(norm: BatchNorm) -> BatchNorm:
        # A batch of one value has no unbiased variance; all batches together have one.
        pooler = _layers.copied(norm, approach=Cumulative(), inference=False, unbiased=False)
        if is_mapped:  # the batch is one group
            pooler = _layers.copied(pooler, memory_axis_name=())
        return pooler

    pooler, after = _layers.replaced(model, state, norms, pooling, _empty)
    count = 0
    for batch in batches:
        after = _step(forward, pooler, after, batch)
        count += 1
    if not count:
        raise ValueError("batches is empty: there is nothing to compute statistics from.")
    return _with_learnt(model, state, after, norms, count)


def _with_learnt(
    model: PyTree, state: eqx.nn.State, after: eqx.nn.State, norms: Nodes, count: int
) -> eqx.nn.State:
    """Returns the state with the statistics of the pass, `after` that number of batches; warns
    of batches that were skipped, and raises `ValueError` if no norm got a finite batch."""
    learnt = Entries()
    notes = list[str]()
    unseen = 0
    for path, norm in norms.items():
        name = path or "the model"
        old, new = state.get(norm.memory_index), after.get(norm.memory_index)
        skipped = np.max(new.rejected - old.rejected)
        if skipped:
            notes.append(f"{name} skipped {skipped} that were not finite")
        if np.all(new.statistics.count_pair.value > 0):
            pooler = _layers.copied(norm, approach=Cumulative())
            (memory,) = carry(pooler, norm, new)
        else:
            memory = Remembered(old.statistics, jnp.stack([old.accepted, new.rejected], -1))
            unseen += 1
            notes.append(f"{name} got no finite batch and keeps its statistics")
        learnt[norm.memory_index.marker] = memory
    note = f"Of {count} batches: {'; '.join(notes)}."
    if unseen == len(norms):
        raise ValueError(
            f"No batch norm got a finite batch. {note} Check the data, and that forward calls "
            "the model."
        )
    if notes:
        warnings.warn(note, stacklevel=stacklevel())
    return _layers.with_entries(model, state, learnt)


def _empty(old: BatchNorm, new: BatchNorm, memory: Remembered) -> tuple[Remembered]:
    """Returns an empty memory. Raises, before any data is read, for a strategy that cannot
    `load` the new statistics."""

    def check(statistics: PyTree) -> PyTree:
        empty = new_statistics(new, statistics)
        _contract.load(old.approach, new.approach.infer(empty), new_statistics(old, statistics))
        return empty

    statistics = _layers.over_members(check, memory.accepted)(memory.statistics)
    counts = jnp.stack([batches_of(old, memory), memory.rejected], -1)
    return (Remembered(statistics, counts),)


# `_step` is compiled once for all calls with the same forward.
@eqx.filter_jit
def _step(forward: Forward, model: PyTree, state: eqx.nn.State, batch: PyTree) -> eqx.nn.State:
    structure = jax.tree.structure(state)
    result = forward(model, state, batch)
    result = result[-1] if isinstance(result, tuple) and result else result
    if not isinstance(result, eqx.nn.State):
        raise ValueError(
            f"forward(model, state, batch) returned {type(result).__name__}, but must return "
            "the new state, alone or last in a tuple, for example (y, state)."
        )
    if jax.tree.structure(result) != structure:
        raise ValueError(
            "forward(model, state, batch) returned the state of another model: it must call "
            "the model that it is given, with the state that it is given."
        )
    return result


_FORWARD = "forward=lambda model, state, batch: ..., which returns the new state"
_FIX = f"Pass {_FORWARD}."
_ENSEMBLE = """The model is an ensemble, so say which member sees which data. If all see all:
    of_one = lambda model, state, x: jax.vmap(
        model, axis_name={!r}, in_axes=(0, None), out_axes=(0, None))(x, state)
    axes = eqx.if_array(0), eqx.if_array(0), None
    states = recalibrate(models, states, batches, eqx.filter_vmap(of_one, in_axes=axes))
Or recalibrate the members one by one, and stack their states."""


def _checked_batches(batches: PyTree) -> Iterable[PyTree]:
    """Returns the batches; raises `ValueError` for a single array, and for no iterable."""
    if eqx.is_array(batches) or hasattr(batches, "__array__"):  # PyTorch's, too
        raise ValueError(
            f"batches is an array of shape {tuple(batches.shape)}; give an iterable of "
            "batches, for example [x], or list(x) if the first axis of x counts batches."
        )
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, str | bytes | type | Mapping) or not is_iterable:
        raise ValueError(
            f"batches={described(batches)} is no iterable of batches. Write recalibrate(model, "
            "state, batches), where batches is for example [x]."
        )
    return batches


def _first(batch: PyTree) -> Shaped[Array | np.ndarray, "..."]:
    """Returns the x of a batch as an array."""
    x: PyTree = batch[0] if isinstance(batch, tuple | list) and len(batch) else batch
    if eqx.is_array(x):
        return x
    x = np.asarray(x)
    if x.dtype.kind not in "biufcV":  # V: bfloat16
        raise ValueError(f"batches yields a {type(batch).__name__}, not arrays. {_FIX}")
    return x


def _over_batch(
    axis_name: Hashable,
    model: PyTree,
    state: eqx.nn.State,
    x: Shaped[Array | np.ndarray, "..."],
) -> PyTree:
    if not callable(model):
        raise ValueError(f"The model is a {type(model).__name__}, not callable. {_FIX}")
    mapped = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name=axis_name)
    try:
        return mapped(x, state)
    except Exception as error:
        layers = _layers.layers_of(model, (*LINEAR, BatchNorm)).values()
        if any(map(_layers.axes_in_front, layers)):
            raise ValueError(_ENSEMBLE.format(axis_name)) from error
        raise ValueError(
            f"The model was mapped over {axis_name!r}, the first axis of a batch of shape "
            f"{x.shape}, and failed on an example of shape {x.shape[1:]}: {error}\n{_FIX}"
        ) from error
