"""Pools the moments of many batches in float64, and hands them to a layer's strategy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from eqx_norm import _contract, _memory
from eqx_norm._batch_norm import BatchNorm
from eqx_norm.strategies import AbstractStrategy, Moments, TrainingBatch

from ._layers import state_of


class Pooling(AbstractStrategy[Moments]):
    """Normalises a training batch by itself, and remembers the moments of all values."""

    def init(self, channels: int, dtype: DTypeLike) -> Moments:
        return Moments.zero(channels, dtype)

    def update(self, batch: TrainingBatch, memory: Moments) -> tuple[Moments, Moments]:
        return batch, memory.merge(batch)

    def infer(self, memory: Moments) -> Moments:
        return memory


def pooling(norm: BatchNorm) -> BatchNorm:
    """Returns the layer in training mode and with `Pooling` for its approach."""
    return eqx.tree_at(
        lambda norm: (norm.approach, norm.inference),
        norm,
        (Pooling(), False),
        is_leaf=lambda node: isinstance(node, AbstractStrategy),
    )


def empty(path: str, norm: BatchNorm, held: dict[Any, Any]) -> Moments:
    """Returns the moments of nothing, in the form of the layer's memory: of an ensemble's, they
    have its first axes. Raises for what cannot be recalibrated, before any data is read."""
    name = type(norm.approach).__name__
    memory = held.get(norm.memory_index.marker)
    leaves = jax.tree.leaves(memory)
    dtype = _memory.statistics_dtype(complex if any(map(jnp.iscomplexobj, leaves)) else float)
    expected = norm.approach.init(norm.input_size, dtype)
    first = zip(leaves, jax.tree.leaves(expected), strict=False)
    lead = next((a.shape[: max(0, a.ndim - b.ndim)] for a, b in first), ())
    entry = {} if memory is None else {norm.memory_index.marker: memory}
    one = jax.tree.map(lambda leaf: leaf[(0,) * len(lead)] if leaf.ndim else leaf, entry)
    # For the errors that a call has for a state that is not the layer's.
    _memory.recall(state_of(norm, one), norm.memory_index, norm.approach, norm.input_size)
    zero = Moments.zero(norm.input_size, dtype)
    try:
        loaded = _load(norm, zero)
    except NotImplementedError as error:
        raise NotImplementedError(f"{path or 'The model'}: {error}") from None
    _contract.check_form(f"{name}.load", expected, loaded)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, lead + leaf.shape), zero)


def _load(norm: BatchNorm, moments: Moments) -> Any:
    return norm.approach.load(dataclasses.replace(moments, ddof=int(norm.unbiased)))


# JAX has float64 only under `jax.enable_x64`; its caches know of it.
def wide(moments: list[Moments]) -> list[Moments]:
    """Returns the moments in float64."""
    with jax.enable_x64(True):
        return _wide(moments)


def merged(pooled: list[Moments], more: list[Moments]) -> list[Moments]:
    """Returns moments in float64, each merged with the one beside it."""
    with jax.enable_x64(True):
        return _merged(pooled, more)


@jax.jit
def _wide(moments: list[Moments]) -> list[Moments]:
    def wide(one: Moments) -> Moments:
        return one.astype(jnp.complex128 if jnp.iscomplexobj(one.mean) else jnp.float64)

    return [_mapped(wide, one.count.ndim)(one) for one in moments]


@jax.jit
def _merged(pooled: list[Moments], more: list[Moments]) -> list[Moments]:
    pairs = zip(pooled, _wide(more), strict=True)
    return [_mapped(Moments.merge, a.count.ndim)(a, b) for a, b in pairs]


def loaded(norm: BatchNorm, pooled: Moments) -> Any:
    """Returns the memory of one who has learnt these moments, which are in float64."""
    dtype = _memory.statistics_dtype(pooled.mean.dtype)

    def narrow(one: Moments) -> Moments:
        rounded = one.astype(dtype)
        rest = one.mean - rounded.mean.astype(one.mean.dtype) + one.mean_rest
        return dataclasses.replace(rounded, mean_rest=rest.astype(dtype))

    axes = pooled.count.ndim
    with jax.enable_x64(True):
        learnt = _mapped(narrow, axes)(pooled)
    return _mapped(functools.partial(_load, norm), axes)(learnt)


def _mapped(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """Returns the function mapped over the first axes, as the moments of an ensemble."""
    for _ in range(axes):
        function = jax.vmap(function)
    return function
