"""Defines `recalibrate`: batch norms learn anew what they remember, from a pass over data."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np

from eqx_norm._batch_norm import BatchNorm
from eqx_norm.strategies import Cumulative, Seen

from ._layers import (
    OverMembers,
    Remembered,
    chosen,
    copied,
    entries,
    found,
    remembered_by,
    replaced,
    state_of,
)
from ._reconfigure import batches_of, carry, dtype_of, is_new

Forward = Callable[[Any, eqx.nn.State, Any], Any]


def recalibrate(
    model: Any,
    state: eqx.nn.State,
    batches: Iterable[Any],
    forward: Forward | None = None,
) -> eqx.nn.State:
    r"""Returns the state with statistics computed anew, of all the data in `batches`.

    With $n_k$, $\mu_k$ and $\sigma_k^2$ the number of values of the $k$-th batch, their mean
    and variance, each batch norm then remembers

    $$\mu = \frac{1}{n} \sum_k n_k \mu_k, \qquad
      \sigma^2 = \frac{1}{n - d} \sum_k n_k \left(\sigma_k^2 + (\mu_k - \mu)^2\right), \qquad
      n = \sum_k n_k,$$

    with weight 1, and $d = 1$ in a layer with `unbiased=True`, otherwise 0. These are the
    statistics of all values together, whatever the sizes of the batches
    (`strategies.Cumulative`). For what it is good: after the weights were averaged over steps,
    or set from elsewhere, or when the running averages lag behind.

    ```python
    state = recalibrate(model, state, tqdm(batches))
    ```

    In the pass each norm normalises a batch by the batch's own statistics, as in training. So
    in a deep network the later norms see inputs that depend on how the data were cut into
    batches, and are given the statistics of those. Take batches as large as in training.

    **Arguments:**

    - `model`: in training or in inference mode: its batch norms normalise by the batch either
        way, frozen ones excepted; other layers do as the mode says. (`eqx.nn.inference_mode`
        turns dropout off.)
    - `state`: stays valid; nothing else in it changes.
    - `batches`: any iterable, passed over once; `tqdm(batches)` has a bar. What it yields are
        arrays whose first axis is the batch's, or tuples `(x, ...)` of which x is taken;
        anything that `forward` takes.
    - `forward`: `forward(model, state, batch)`, which calls the model on a batch and returns
        the new state, alone or as the last of a tuple. Unless given, it is
        `jax.vmap(model, axis_name=..., in_axes=(0, None), out_axes=(0, None))(x, state)`. It is
        compiled, once for each shape.

    **Returns:** the new state. `accepted_index` and `rejected_index` have counted on.

    **Raises:** `ValueError` if there are no batches or no batch norms, none is called, or a
    strategy cannot `load`. A batch whose statistics are not finite is left out and counted as
    in training; a warning says so at the end, and which layers keep what they remembered
    because they were given no finite batch.

    PyTorch's `torch.optim.swa_utils.update_bn` is like it, but gives each batch the same weight
    and adds no spread of the means. Wu and Johnson, "Rethinking 'Batch' in BatchNorm",
    https://arxiv.org/abs/2105.07576, call it precise batch norm.
    """
    what = "eqx_norm.BatchNorm that is not frozen"
    norms = chosen(model, BatchNorm, None, "recalibrate", what, lambda n: n.approach.learns)
    # One value has no unbiased variance; all of them together do.
    pooling: dict[str, Any] = {"approach": Cumulative(), "inference": False, "unbiased": False}
    if forward is None:  # all of a batch are one group
        pooling["memory_axis_name"] = ()
    make = dict.fromkeys(norms, lambda norm: copied(norm, **pooling))
    pooler, now = replaced(model, state, BatchNorm, make, _empty)
    call, count = _over(norms) if forward is None else forward, 0
    for batch in batches:
        now = _step(call, pooler, now, _first(batch) if forward is None else batch)
        count += 1
    if not count:
        raise ValueError("batches is empty: there is nothing to compute statistics from.")
    words, seen, unseen = list[str](), {}, {}
    for path, norm in norms.items():
        before, after = (remembered_by(norm, of)[0] for of in (state, now))
        if left_out := np.max(after["rejected_index"] - before["rejected_index"]):
            words.append(f"{path or 'the model'} left out {left_out}, not finite")
        if np.all(after["memory_index"].moments.count > 0):
            seen[path] = lambda _, norm=norm: norm
        else:
            unseen[norm.memory_index.marker] = before["memory_index"]
            unseen[norm.accepted_index.marker] = before["accepted_index"]
            words.append(f"{path or 'the model'} was given none, and keeps what it remembered")
    said = f"Of {count} batches: {'; '.join(words)}."
    if not seen:
        raise ValueError(f"Nothing was learnt. {said}")
    if words:
        warnings.warn(said, stacklevel=2)
    held = entries(replaced(pooler, now, BatchNorm, seen, carry)[1])
    indices = [i for n in norms.values() for i in found(n, eqx.nn.StateIndex).values()]
    learnt = {index.marker: held[index.marker] for index in indices}
    return state_of(model, entries(state) | learnt | unseen)


def _empty(old: Any, new: Any, remembered: Remembered, over: OverMembers) -> Remembered:
    """Returns the memory of nothing; raises for what cannot be recalibrated, before any data is
    read."""

    def one(memory: Any) -> Seen:
        is_new(old, memory)  # for its errors
        empty = new.approach.init(old.input_size, dtype_of(memory))
        old.approach.load(empty.moments)
        return empty

    memory = over(one)(remembered["memory_index"])
    return remembered | {"memory_index": memory, "accepted_index": batches_of(remembered)}


# Compiled once for all calls with the same forward.
@eqx.filter_jit
def _step(forward: Forward, model: Any, state: eqx.nn.State, batch: Any) -> eqx.nn.State:
    """Returns the state after one batch."""
    result = forward(model, state, batch)
    result = result[-1] if isinstance(result, tuple) and result else result
    if not isinstance(result, eqx.nn.State):
        raise ValueError(
            f"forward(model, state, batch) returned {type(result).__name__}, but has to return "
            "the new state, alone or as the last of a tuple, for example (y, state)."
        )
    return result


_SAY = "say how: forward=lambda model, state, batch: ..., which returns the new state"


def _first(batch: Any) -> Any:
    """Returns the x of a batch as an array."""
    x: Any = batch[0] if isinstance(batch, tuple | list) and len(batch) else batch
    x = x if eqx.is_array(x) else np.asarray(x)
    if x.dtype == object or not x.ndim:
        raise ValueError(
            f"batches yields a {type(batch).__name__}, which is neither an array nor a tuple "
            f"that starts with one. To call a model on something else, {_SAY}."
        )
    return x


def _over(norms: dict[str, BatchNorm]) -> Forward:
    """Returns what calls a model on the examples of a batch; equal for equal names of axes."""
    axis_name = next(iter(norms.values())).axis_name
    name = axis_name[0] if isinstance(axis_name, tuple) else axis_name
    return jax.tree_util.Partial(_over_axis, name)


def _over_axis(name: Any, model: Any, state: eqx.nn.State, x: Any) -> Any:
    axes: Any = {"in_axes": (0, None), "out_axes": (0, None)}
    try:
        return jax.vmap(model, axis_name=name, **axes)(x, state)
    except Exception as error:
        raise ValueError(
            f"The model was mapped over {name!r}, the first axis of a batch of shape "
            f"{x.shape}, and failed on an example of shape {x.shape[1:]}: {error}\n"
            f"To call it in another way, {_SAY}."
        ) from error
