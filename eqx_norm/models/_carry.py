"""Carries what one layer's memory holds over to another's."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from eqx_norm import _contract, _memory
from eqx_norm._batch_norm import BatchNorm
from eqx_norm._memory import Remembered
from eqx_norm.strategies import AbstractStrategy, AbstractWrapper, Running

from ._layers import over_members


def carry(old: BatchNorm, new: BatchNorm, memory: Remembered) -> tuple[Remembered]:
    """Returns the new layer's memory, with which it infers as the old one does.

    Strategies whose memory is a `Running` share it unchanged; others `load` it. A memory
    without batches becomes a new one. Pending micro-batches are dropped, and accepted
    micro-batches that were no update are not counted.
    """
    fresh = over_members(lambda s: is_new(old, s), memory.accepted)(memory.statistics)
    if old.approach == new.approach:
        return (memory,)
    is_same = type(_innermost(old.approach)) is type(_innermost(new.approach))
    try:
        is_untrained = bool(fresh.all())
    except jax.errors.ConcretizationTypeError:
        is_untrained = False

    def one(statistics: Any, fresh: Bool[Array, ""]) -> Any:
        start = new.approach.init(new.input_size, _memory.dtype_of(statistics))
        core, _ = old.approach.without_pending(statistics)
        empty, _ = new.approach.without_pending(start)
        fits = jax.tree.structure(core) == jax.tree.structure(empty)
        if fits and (isinstance(core, Running) or is_same):
            return eqx.tree_at(
                lambda start: new.approach.without_pending(start)[0], start, core
            )
        if is_untrained:  # no `load` is needed
            return start
        moments = old.approach.infer(statistics)
        # A strategy that keeps counts makes the unbiased variance from its count.
        learnt = dataclasses.replace(moments, ddof=int(new.unbiased))
        loaded = _contract.load(new.approach, learnt, start)
        return jax.tree.map(lambda a, b: jnp.where(fresh, a, b), start, loaded)

    statistics = over_members(one, memory.accepted)(memory.statistics, fresh)
    return (with_statistics(old, memory, statistics),)


def with_statistics(layer: BatchNorm, memory: Remembered, statistics: Any) -> Remembered:
    """Returns the layer's memory with other statistics; it counts no micro-batches."""
    return Remembered(statistics, jnp.stack([batches_of(layer, memory), memory.rejected], -1))


def batches_of(layer: BatchNorm, memory: Remembered) -> Int[Array, "*members"]:
    """Returns how many batches, not micro-batches, a strategy has accepted."""
    return memory.accepted - layer.approach.without_pending(memory.statistics)[1]


def is_new(layer: BatchNorm, statistics: Any) -> Bool[Array, ""]:
    """Returns whether a layer has accepted no batch; raises for another layer's statistics."""
    _memory.check(statistics, layer.approach, layer.input_size)
    start = layer.approach.init(layer.input_size, _memory.dtype_of(statistics))
    pairs = (jax.tree.leaves(layer.approach.without_pending(s)[0]) for s in (statistics, start))
    return jnp.all(jnp.asarray([jnp.all(a == b) for a, b in zip(*pairs, strict=True)]))


def _innermost(approach: AbstractStrategy[Any]) -> AbstractStrategy[Any]:
    """Returns the strategy inside of all wrappers."""
    while isinstance(approach, AbstractWrapper):
        approach = approach.strategy
    return approach
