"""Defines `pool_statistics`, which merges the running statistics of several states."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree

from eqx_norm import _contract, _memory
from eqx_norm._batch_norm import BatchNorm
from eqx_norm._compiled import compiled
from eqx_norm._contract import described
from eqx_norm._memory import Remembered
from eqx_norm.strategies import Moments
from eqx_norm.strategies._moments import select
from eqx_norm.strategies._numbers import number

from . import _layers
from ._carry import batches_of, is_new, new_statistics
from ._layers import Entries, Nodes


def pool_statistics(
    model: Any, states: Iterable[eqx.nn.State], values: Iterable[ArrayLike]
) -> eqx.nn.State:
    r"""Returns one state with the statistics of the data of several states together.

    The states are those of clients, folds or workers, which trained on different data. With
    their numbers of values $n_k$, running means $\mu_k$ and variances $\sigma_k^2$, those of
    each batch norm in the new state are

    $$\mu = \frac{1}{n} \sum_k n_k \mu_k, \qquad
      \sigma^2 = \frac{1}{n - d} \sum_k \left( (n_k - d) \sigma_k^2
        + n_k (\mu_k - \mu)^2 \right), \qquad n = \sum_k n_k,$$

    where $d = 1$ in a layer with `unbiased=True`, otherwise 0 (Chan, Golub and LeVeque, 1979).
    An average of the states leaves out the variance between the means.

    ```python
    state = pool_statistics(model, states, values=[9_600, 3_200])
    ```

    **Arguments:**

    - `model`: the model of all states, which may be an ensemble or have frozen layers.
    - `states`: the states, on any devices; they stay valid.
    - `values`: the number of values per channel, above 0, for each state. Only ratios matter,
        except in a layer with `unbiased=True`. A memory that knows its number, as that of
        `Cumulative`, is weighed by it instead.

    **Returns:** a new state. An entry that is equal in all states is kept to the bit. Otherwise
    the layer's approach `load`s the statistics, without pending micro-batches, and counts of
    batches are summed, up to $2^{31} - 1$. A layer's states without a batch do not count. If
    the states started from common statistics, sums of counts contain these once per state.

    **Raises:** `ValueError` without states, for other than one positive number for each, for
    the state of another model, for an approach that cannot `load`, and if an entry that is not
    a `BatchNorm`'s differs between states.
    """
    _layers.check_model(model)
    states = _checked_states(states)
    weights = _checked_values(values, len(states))
    _layers.check_untraced(model, states, weights)
    norms = _layers.chosen(model, BatchNorm, None, "pool", "eqx_norm.BatchNorm")
    ours = {norm.memory_index.marker: path for path, norm in norms.items()}
    entries_of_states = list[Entries]()
    for i, state in enumerate(states):
        with _layers.located(f"states[{i}]", state):
            entries_of_states.append(_checked_entries(model, norms, state))
    pooled = Entries()
    for marker in dict.fromkeys(itertools.chain(*entries_of_states)):
        found: list[PyTree] = [entries.get(marker) for entries in entries_of_states]
        if eqx.tree_equal(*found):
            continue
        if marker not in ours:
            indices = _layers.layers_of(model, eqx.nn.StateIndex).items()
            paths = [path for path, index in indices if index.marker == marker]
            raise ValueError(
                f"{_layers.listed(paths) or marker}: the states differ in this entry, which is "
                "no BatchNorm's of eqx_norm. Put one value into all of them, by "
                "state = state.set(index, value)."
            )
        path = ours[marker]
        with _layers.located(path, norms[path]):
            pooled[marker] = _pooled(norms[path], found, weights)
    return _layers.with_entries(model, states[0], pooled)


def _checked_states(states: object) -> list[eqx.nn.State]:
    listed = list(states) if isinstance(states, Iterable) else []
    if not listed:
        raise ValueError(
            f"states={described(states)} holds no states: give a list, one for each client, "
            "such as states=[state, other]. (A generator is empty after its first use.)"
        )
    for i, state in enumerate(listed):
        if not isinstance(state, eqx.nn.State):
            raise ValueError(
                f"states[{i}] is {described(state)}, no eqx.nn.State: give a list with the "
                "state of each client, such as states=[state, other]."
            )
    return listed


def _checked_values(values: PyTree, states: int) -> list[float]:
    try:
        listed = list(values)
    except TypeError:  # no iterable, or an array without axes
        listed = []
    if len(listed) != states:
        raise ValueError(
            f"values={described(values)}, but the number of states is {states}: give a list "
            "with the number of values per channel of each."
        )
    weights = [number(value) for value in listed]
    for i, weight in enumerate(weights):
        if not (isinstance(weight, float) and 0 < weight < math.inf):
            raise ValueError(
                f"values[{i}] is {described(weight)}, but must be a number above 0, of values "
                "per channel. Leave out a state without data."
            )
    return weights


def _checked_entries(model: PyTree, norms: Nodes, state: eqx.nn.State) -> Entries:
    """Returns the entries of a state, as NumPy's arrays; raises for that of another model."""
    entries = _layers.checked_entries(model, state, norms)
    for path, norm in norms.items():
        with _layers.located(path, norm):
            memory = _memory.entry(norm, state)
            check = functools.partial(_memory.check, norm)
            _layers.over_members(check, memory.accepted)(memory)
    # On the host, because JAX compares no arrays of different devices.
    return {marker: jax.device_get(entry) for marker, entry in entries.items()}


def _pooled(norm: BatchNorm, memories: list[Remembered], weights: list[float]) -> Remembered:
    if norm.unbiased and min(weights) <= 1:
        raise ValueError(
            f"values={weights}: the layer has unbiased=True, so its variance depends on the "
            "number of values itself. Give numbers above 1, not shares."
        )
    memories = jax.tree.map(jnp.asarray, memories)
    # Without what differs between layers, so that equal layers share a compiled program.
    alike = _layers.copied(norm, weight=None, bias=None, activation=None, memory_index=None)
    statistics = _statistics(alike, None, memories, jnp.asarray(weights, float))
    counts = [np.stack([batches_of(norm, m), m.rejected], -1) for m in memories]
    total = np.sum(counts, axis=0, dtype=np.int64).clip(max=np.iinfo(np.int32).max)
    return Remembered(statistics, jnp.asarray(total, jnp.int32))


@compiled
def _statistics(
    norm: BatchNorm,
    options: None,
    memories: list[Remembered],
    weights: Float[Array, " states"],
) -> PyTree:
    """Returns the pooled memory of the layer's approach."""
    del options

    def weighed(memory: Remembered, weight: Float[Array, ""]) -> Moments:
        learnt = _contract.running(norm, memory.statistics)
        if learnt.count is None:
            learnt = Moments.of(learnt.mean_pair, learnt.variance, weight, learnt.ddof)
        count = jnp.where(is_new(norm, memory), 0, learnt.known_count)
        return dataclasses.replace(learnt, count=count)

    def pool(memories: list[Remembered]) -> PyTree:
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *memories)
        pooled = jax.vmap(weighed)(stacked, weights).pooled()
        start = new_statistics(norm, stacked.statistics)
        loaded = _contract.load(norm.approach, pooled, start)
        return select(jnp.any(pooled.known_count > 0), loaded, start)

    return _layers.over_members(pool, memories[0].accepted)(memories)
