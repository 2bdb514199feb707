"""Defines `pool_statistics`, which merges the running statistics of several states."""

import dataclasses
import functools
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
from eqx_norm._memory import Remembered
from eqx_norm.strategies import Moments
from eqx_norm.strategies._numbers import number

from . import _layers
from ._carry import batches_of, is_new
from ._layers import Entries, Nodes


def pool_statistics(
    model: PyTree, states: Iterable[eqx.nn.State], values: Iterable[ArrayLike]
) -> eqx.nn.State:
    r"""Returns one state with the running statistics of the data of several states together.

    Use it for the states of clients, folds or workers that trained the same model on different
    data. With $n_k$, $\mu_k$ and $\sigma_k^2$ the number of values of state $k$, its running
    mean and variance, those of each batch norm in the new state are

    $$\mu = \frac{1}{n} \sum_k n_k \mu_k, \qquad
      \sigma^2 = \frac{1}{n - d} \sum_k \left( (n_k - d) \sigma_k^2
        + n_k (\mu_k - \mu)^2 \right), \qquad n = \sum_k n_k,$$

    where $d = 1$ in a layer with `unbiased=True`, otherwise 0. An average of the states, leaf
    by leaf, lacks the variance between the means.

    ```python
    state = pool_statistics(model, states, values=[9_600, 3_200])
    ```

    **Arguments:**

    - `model`: the model, also an ensemble; its batch norms may be frozen.
    - `states`: its states, which stay valid, on any devices.
    - `values`: for each state the number of values per channel that its statistics stand for,
        above 0, such as the number of examples times that of pixels. Only ratios matter, unless
        the layer is `unbiased` or its approach keeps the number. A memory that knows its number
        of values, as that of `Cumulative`, has that weight instead.

    **Returns:** a new state. An entry that is equal in all states is kept to the bit. Elsewhere
    a layer's approach `load`s the pooled statistics, so pending micro-batches are dropped, and
    `accepted` and `rejected` are summed, up to $2^{31} - 1$. States in which a layer has seen
    no batch do not count for the layer.

    If the states began with common statistics, as in rounds of federated learning, sums of
    counts, also those of `Cumulative`, contain the common past once for each state.

    **Raises:** `ValueError` if there are no states, or not one positive number for each, for a
    state of another model, for an approach that cannot `load`, and if the states differ in an
    entry that is not a `BatchNorm`'s.

    Chan, Golub and LeVeque, 1979.
    """
    states, weights = _checked(states, values)
    _layers.untraced(model, states, weights)
    norms = _layers.chosen(model, BatchNorm, None, "pool", "eqx_norm.BatchNorm")
    held = list[Entries]()
    for i, state in enumerate(states):
        with _layers.located(f"states[{i}]", state):
            held.append(_held(model, norms, state))
    _check_rest(model, norms, held)
    pooled = Entries()
    for path, norm in norms.items():
        marker = norm.memory_index.marker
        memories = [entries[marker] for entries in held]
        if not eqx.tree_equal(*memories):
            with _layers.located(path, norm):
                pooled[marker] = _pooled(norm, memories, jnp.asarray(weights, float))
    return _layers.state_of(model, _layers.entries(states[0]) | pooled)


def _checked(states: Any, values: Any) -> tuple[list[Any], list[float]]:
    """Returns the states and the values as lists."""
    if isinstance(states, eqx.nn.State) or not isinstance(states, Iterable):
        raise ValueError(
            f"states is a {type(states).__name__}: give a list of the states to pool, such as "
            "states=[state, other]."
        )
    states = list(states)
    if not states:
        raise ValueError(
            "states is empty: there is nothing to pool. (A generator is empty after its first "
            "use: write states=list(...).)"
        )
    try:
        weights = [number(value) for value in values]
    except TypeError:
        weights = [values]
    if len(weights) != len(states):
        raise ValueError(
            f"values={values!r} has the length {len(weights)}, and states {len(states)}: give "
            "one number for each state, the number of values per channel."
        )
    for i, weight in enumerate(weights):
        if not (isinstance(weight, float) and 0 < weight < math.inf):
            raise ValueError(
                f"values[{i}] is {weight!r}: the number of values per channel of a state must "
                "be a number above 0. Leave out a state without data."
            )
    return states, weights


def _held(model: PyTree, norms: Nodes, state: Any) -> Entries:
    """Returns the entries of a state, as NumPy's arrays; raises for that of another model."""
    entries = _layers.checked(model, state)
    for path, norm in norms.items():
        with _layers.located(path, norm):
            memory = _memory.entry(norm, state)
            check = functools.partial(_memory.check, norm)
            _layers.over_members(check, memory.accepted)(memory)
    # Not of the dictionary: JAX cannot sort markers of different types.
    return {marker: jax.device_get(entry) for marker, entry in entries.items()}


def _check_rest(model: PyTree, norms: Nodes, held: list[Entries]) -> None:
    """Raises `ValueError` if states differ in an entry of another layer."""
    indices = _layers.layers_of(model, eqx.nn.StateIndex)
    paths = {index.marker: path for path, index in indices.items()}
    markers = dict.fromkeys(marker for entries in held for marker in entries)
    ours = {norm.memory_index.marker for norm in norms.values()}
    for marker in markers:
        found = [entries.get(marker) for entries in held]
        if marker not in ours and not eqx.tree_equal(*found):
            raise ValueError(
                f"{paths.get(marker, marker)}: the states differ in this entry, which is not a "
                "BatchNorm's of eqx_norm, so how to pool it is not known. Put one value into "
                "all of them first, by state = state.set(index, value)."
            )


def _pooled(
    norm: BatchNorm, memories: list[Remembered], weights: Float[Array, " states"]
) -> Remembered:
    """Returns what a layer remembers of all states together."""
    memories = jax.tree.map(jnp.asarray, memories)
    # Without what differs between layers, so that equal layers share a compiled program.
    alike = _layers.copied(norm, weight=None, bias=None, activation=None, memory_index=None)
    statistics = _statistics(alike, None, memories, weights)
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

    def one(memories: list[Remembered]) -> PyTree:
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *memories)
        learnt = jax.vmap(weighed)(stacked, weights).pooled()
        start = norm.approach.init(norm.input_size, _memory.dtype_of(stacked.statistics))
        loaded = _contract.load(norm.approach, learnt, start)
        is_seen = jnp.any(learnt.known_count > 0)
        return jax.tree.map(lambda a, b: jnp.where(is_seen, a, b), loaded, start)

    return _layers.over_members(one, memories[0].accepted)(memories)
