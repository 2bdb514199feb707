"""Carries what a layer remembers over to another approach."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from eqx_norm import _memory
from eqx_norm.strategies import (
    AbstractRunningStrategy,
    AbstractStrategy,
    Accumulated,
    Accumulation,
    Ema,
    Moments,
    Running,
    VarianceClip,
)

Strategy = AbstractStrategy[Any]


def innermost(approach: Strategy) -> Strategy:
    """Returns the strategy inside of those that wrap one and remember what it remembers."""
    if type(approach) is Accumulated or type(approach) is VarianceClip:
        return innermost(approach.strategy)
    return approach


def each_member(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """Returns the function mapped over the leading axes that an ensemble's arrays have."""
    for _ in range(axes):
        function = jax.vmap(function)
    return function


def form(approach: Strategy, channels: int, memory: Any) -> tuple[Any, int]:
    """Returns the memory before any batch, and how many more axes that of an ensemble has.

    **Raises:** `ValueError` unless `memory` is of `approach` and of so many channels.
    """
    empty = approach.init(channels, _dtype(memory))
    axes = {
        held.ndim - made.ndim if held.shape[held.ndim - made.ndim :] == made.shape else -1
        for held, made in zip(jax.tree.leaves(memory), jax.tree.leaves(empty), strict=False)
    }
    same = jax.tree.structure(memory) == jax.tree.structure(empty)
    if not same or len(axes) > 1 or min(axes, default=0) < 0:
        raise ValueError(
            f"the state given belongs to another layer: this one has input_size={channels} and "
            f"approach={approach}. Give the state that was made, or returned, with this model."
        )
    return empty, max(axes, default=0)


def is_new(memory: Any, empty: Any) -> Bool[Array, ""]:
    """Returns whether a memory is as it was before any batch."""
    same = jax.tree.map(lambda a, b: jnp.all(a == b), memory, empty)
    return jnp.all(jnp.asarray(jax.tree.leaves(same)))


def carried(old: Strategy, new: Strategy, channels: int, memory: Any) -> Any:
    """Returns the memory of `new` that infers as `old` does with `memory`.

    Approaches that remember a `Running` hand it on as it is; in that of `Ema` everything has
    weight 1. Others are loaded. What has seen no batch has seen none afterwards. Micro-batches
    that are pending are not handed on.
    """
    empty, axes = form(old, channels, memory)
    dtype = _dtype(memory)
    fresh = each_member(lambda memory: is_new(memory, empty), axes)(memory)
    try:
        never = bool(fresh.all())
    except jax.errors.ConcretizationTypeError:
        never = False

    def one(memory: Any, fresh: Bool[Array, ""]) -> Any:
        remembered = _core(old, memory)
        start = innermost(new).init(channels, dtype)
        if _hands_on(innermost(old), innermost(new), remembered, start):
            if isinstance(innermost(new), Ema):
                weight = (remembered.weight > 0).astype(remembered.weight.dtype)
                remembered = dataclasses.replace(
                    remembered, weight=weight, weight_rest=jnp.zeros_like(weight)
                )
            return _around(new, remembered, channels, dtype)
        if never:  # then a strategy without `load` serves, too
            return new.init(channels, dtype)
        used = old.infer(memory)
        loaded = innermost(new).load(Moments.of(used.mean, used.variance, used.mean_rest))
        chosen = jax.tree.map(lambda a, b: jnp.where(fresh, a, b), start, loaded)
        return _around(new, chosen, channels, dtype)

    return each_member(one, axes)(memory, fresh)


def _dtype(memory: Any) -> jnp.dtype:
    is_complex = any(map(jnp.iscomplexobj, jax.tree.leaves(memory)))
    return _memory.statistics_dtype(complex if is_complex else float)


def _hands_on(old: Strategy, new: Strategy, memory: Any, start: Any) -> bool:
    if isinstance(old, AbstractRunningStrategy) and isinstance(new, AbstractRunningStrategy):
        return type(memory) is type(start) is Running
    same = jax.tree.structure(memory) == jax.tree.structure(start)
    return type(old) is type(new) and same


def _core(approach: Strategy, memory: Any) -> Any:
    """Returns what of the memory is the innermost strategy's."""
    if type(approach) is Accumulated:
        return _core(approach.strategy, memory.remembered)
    return _core(approach.strategy, memory) if type(approach) is VarianceClip else memory


def _around(approach: Strategy, memory: Any, channels: int, dtype: Any) -> Any:
    """Returns the memory of the strategy whose innermost one has `memory`."""
    if type(approach) is Accumulated:
        inner = _around(approach.strategy, memory, channels, dtype)
        return Accumulation.begun(inner, channels, dtype)
    if type(approach) is VarianceClip:
        return _around(approach.strategy, memory, channels, dtype)
    return memory
