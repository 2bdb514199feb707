"""Defines `recalibrate`: batch norms learn anew what they remember, from a pass over data."""

import importlib.util
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np

from eqx_norm._batch_norm import BatchNorm

from . import _pooled
from ._freeze import FrozenBatchNorm
from ._layers import each, entries, found, state_of

Forward = Callable[[Any, eqx.nn.State, Any], Any]


def recalibrate(
    model: Any,
    state: eqx.nn.State,
    batches: Iterable[Any],
    forward: Forward | None = None,
    progress: bool | None = None,
) -> eqx.nn.State:
    r"""Returns the state with statistics computed anew, of all the data in `batches`.

    With $n_k$, $\mu_k$ and $\sigma_k^2$ the number of values of the $k$-th batch, their mean
    and variance, each batch norm then remembers

    $$\mu = \frac{1}{n} \sum_k n_k \mu_k, \qquad
      \sigma^2 = \frac{1}{n - d} \sum_k n_k \left(\sigma_k^2 + (\mu_k - \mu)^2\right), \qquad
      n = \sum_k n_k,$$

    with weight 1, and $d = 1$ in a layer with `unbiased=True`, otherwise 0. These are the
    statistics of all values together, whatever the sizes of the batches; they are merged in
    float64. For what it is good: after the weights were averaged over steps, or set from
    elsewhere, or when the running averages lag behind.

    ```python
    import equinox as eqx
    import jax
    from eqx_norm import BatchNorm
    from eqx_norm.models import recalibrate


    def build(key):
        conv = eqx.nn.Conv2d(3, 4, 3, key=key)
        return eqx.nn.Sequential([conv, BatchNorm(4, "batch", approach="batch")])


    model, state = eqx.nn.make_with_state(build)(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (50, 3, 8, 8))
    state = recalibrate(model, state, [images[:32], images[32:]])
    ```

    In the pass each norm normalises a batch by the batch's own statistics, as in training. So
    in a deep network the later norms see inputs that depend on how the data were cut into
    batches, and are given the statistics of those. Take batches as large as in training.

    **Arguments:**

    - `model`: in training or in inference mode: its batch norms normalise by the batch either
        way, frozen ones excepted; other layers do as the mode says. (`eqx.nn.inference_mode`
        turns dropout off.)
    - `state`: stays valid; nothing else in it changes.
    - `batches`: any iterable, passed over once. What it yields are arrays whose first axis is
        the batch's, or tuples `(x, ...)` of which x is taken; anything that `forward` takes.
    - `forward`: `forward(model, state, batch)`, which calls the model on a batch and returns
        the new state, alone or as the last of a tuple. Unless given, it is
        `jax.vmap(model, axis_name=..., in_axes=(0, None), out_axes=(0, None))(x, state)`. It is
        compiled, once for each shape.
    - `progress`: whether there is a bar; unless given, where stderr is a terminal and tqdm is
        installed.

    **Returns:** the new state. `accepted_index` and `rejected_index` have counted on.

    **Raises:** `ValueError` if there are no batches or no batch norms, or none is called; and
    `NotImplementedError` for a strategy that cannot `load`. A batch whose statistics are not
    finite is left out and counted as in training; a warning says so at the end, and which
    layers keep what they remembered because they were given no finite batch.

    PyTorch's `torch.optim.swa_utils.update_bn` is like it, but gives each batch the same weight
    and adds no spread of the means. Wu and Johnson, "Rethinking 'Batch' in BatchNorm",
    https://arxiv.org/abs/2105.07576, call it precise batch norm.
    """
    norms = {
        path: norm
        for path, norm in found(model, BatchNorm).items()
        if not isinstance(norm, FrozenBatchNorm)
    }
    if not norms:
        raise ValueError(
            "There is nothing to recalibrate: the model holds no eqx_norm.BatchNorm that is "
            "not frozen."
        )
    held = entries(state)
    made = {path: _pooled.empty(path, norm, held) for path, norm in norms.items()}
    axis_name = _axis_name(norms) if forward is None else None
    pooling = each(
        model, BatchNorm, lambda p, norm: _pooled.pooling(norm) if p in norms else norm
    )

    # By marker: norms that share a memory pool into one.
    owners = {norm.memory_index.marker: norm for norm in norms.values()}
    empty = {norms[path].memory_index.marker: zero for path, zero in made.items()}
    now, pooled, count = held | empty, _pooled.wide(list(empty.values())), 0
    for batch in _with_bar(batches, progress):
        inputs = _inputs(batch) if forward is None else batch
        now = entries(_step(forward, axis_name, pooling, state_of(model, now), inputs))
        pooled = _pooled.merged(pooled, [now[marker] for marker in empty])
        now, count = now | empty, count + 1
    if not count:
        raise ValueError("batches is empty: there is nothing to compute statistics from.")
    moments = zip(empty, pooled, strict=True)
    learnt = {m: one for m, one in moments if np.all(np.asarray(one.count) > 0)}
    _report(norms, held, now, learnt, count)
    result = held | {m: _pooled.loaded(owners[m], one) for m, one in learnt.items()}
    for norm in norms.values():
        for index in (norm.accepted_index, norm.rejected_index):
            result[index.marker] = now[index.marker]
    return state_of(model, result)


def _inputs(batch: Any) -> Any:
    """Returns the x of a batch as an array."""
    x: Any = batch[0] if isinstance(batch, tuple | list) and len(batch) else batch
    x = x if eqx.is_array(x) else np.asarray(x)
    if x.dtype == object or not x.ndim:
        raise ValueError(
            f"batches yields a {type(batch).__name__}, which is neither an array nor a tuple "
            "that starts with one. Say how to call the model on it: forward=lambda model, "
            "state, batch: ..., which returns the new state."
        )
    return x


@eqx.filter_jit
def _step(
    forward: Forward | None, axis_name: Any, model: Any, state: eqx.nn.State, batch: Any
) -> eqx.nn.State:
    """Returns the state after one batch; compiled once for all calls with the same forward."""
    if forward is None:
        mapped = jax.vmap(model, axis_name=axis_name, in_axes=(0, None), out_axes=(0, None))
        result: Any = mapped(batch, state)
    else:
        result = forward(model, state, batch)
    result = result[-1] if isinstance(result, tuple) and result else result
    if not isinstance(result, eqx.nn.State):
        raise ValueError(
            f"forward(model, state, batch) returned {type(result).__name__}, but has to return "
            "the new state, alone or as the last of a tuple, for example (y, state)."
        )
    return result


def _axis_name(norms: dict[str, BatchNorm]) -> Any:
    """Returns the one name under which to map the model; raises `ValueError` for several."""
    names = {norm.axis_name for norm in norms.values()}
    (name, *others) = names
    if isinstance(name, tuple) and len(name) == 1:
        (name,) = name
    if others or isinstance(name, tuple):
        raise ValueError(
            f"The batch norms take statistics over several axes, {names}. Say how to call the "
            "model: forward=lambda model, state, batch: ..., which returns the new state."
        )
    return name


def _with_bar(batches: Iterable[Any], progress: bool | None) -> Iterable[Any]:
    if progress is False or (progress is None and not importlib.util.find_spec("tqdm")):
        return batches
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError(
            "progress=True: the bar is tqdm's, which is not installed. Leave progress= out, or "
            "wrap the batches in a bar of your own."
        ) from None
    hidden = None if progress is None else False  # None: unless stderr is a terminal
    return tqdm(batches, desc="recalibrate", unit=" batches", disable=hidden)


def _report(
    norms: dict[str, BatchNorm],
    before: dict[Any, Any],
    after: dict[Any, Any],
    learnt: dict[Any, Any],
    count: int,
) -> None:
    """Warns of batches that were left out, and raises `ValueError` if nothing was learnt."""
    words = []
    for path, norm in norms.items():
        marker = norm.rejected_index.marker
        rejected = int(np.max(np.asarray(after[marker]) - np.asarray(before[marker])))
        name = path or "the model"
        if norm.memory_index.marker not in learnt:
            why = "was given no finite batch" if rejected else "was not called in training mode"
            words.append(f"{name} {why} and keeps what it remembered")
        elif rejected:
            words.append(f"{name} left out {rejected}, whose statistics are not finite")
    if not learnt:
        raise ValueError(f"Nothing was learnt of {count} batches: {'; '.join(words)}.")
    if words:
        warnings.warn(f"Of {count} batches: {'; '.join(words)}.", stacklevel=3)
