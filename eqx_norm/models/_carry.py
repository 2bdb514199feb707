"""Carries the running statistics of one layer over to another layer."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from eqx_norm import _contract, _memory
from eqx_norm._batch_norm import BatchNorm
from eqx_norm._memory import Remembered
from eqx_norm.strategies import AbstractStrategy, AbstractWrapper, Average, Moments, Running
from eqx_norm.strategies._moments import expand_trailing_axes, select
from eqx_norm.strategies._numbers import is_count
from eqx_norm.strategies._running import AbstractAveragingStrategy

from ._layers import is_traced, over_members


def carry(
    old: BatchNorm,
    new: BatchNorm,
    memory: Remembered,
    values: ArrayLike | None = None,
    batches: int | None = None,
) -> tuple[Remembered]:
    """Returns the new layer's memory, which gives the old layer's results in inference.

    If the memories of both strategies have the same meaning and form, the memory is reused;
    otherwise the new strategy `load`s the moments, with `values` for their count. A memory
    without batches becomes a new memory. Pending micro-batches are dropped. Micro-batches
    without an update do not count. `batches` replaces the count of accepted batches.
    """
    untrained = over_members(lambda m: is_new(old, m), memory.accepted)(memory)
    is_kept = old.approach == new.approach
    has_numbers = values is not None or batches is not None
    if (is_kept and has_numbers) or not (batches is None or is_count(batches)):
        raise ValueError(
            f"values={values!r}, batches={batches!r}: they are the numbers of values per "
            "channel and of batches (an int of 1 or more) of statistics that a new approach= "
            "takes over. Leave them out, or by where= a layer that keeps its approach."
        )
    if is_kept:
        return (memory,)
    if values is not None:
        values = checked_values(values, memory.accepted.shape, new.input_size)
    before, after = _innermost(old.approach), _innermost(new.approach)
    accepted = batches_of(old, memory)
    if batches is not None:
        accepted = jnp.where(untrained, accepted, int(batches))
    elif isinstance(after, Average) and not isinstance(before, Average):
        _check_counted(new, untrained, accepted)
    can_reuse = type(before) is type(after) or (_is_average(before) and _is_average(after))
    old_momentum = getattr(before, "momentum", None)
    new_momentum = getattr(after, "momentum", None)
    are_untrained = _is_known_true(untrained.all())

    def convert(
        statistics: PyTree,
        untrained: Bool[Array, ""],
        values: Float[Array, "*#channels"] | None,
    ) -> PyTree:
        start = new_statistics(new, statistics)
        core, _ = old.approach.without_pending(statistics)
        empty, _ = new.approach.without_pending(start)
        if can_reuse and _memory.form(core) == _memory.form(empty):
            if isinstance(core, Running) and not (old_momentum is None or new_momentum is None):
                core = core.at_momentum(old_momentum, new_momentum)
            return eqx.tree_at(
                lambda start: new.approach.without_pending(start)[0], start, core
            )
        if are_untrained:  # no `load` is needed
            return start
        learnt = _contract.running(old, statistics)
        if values is not None:
            ddof = int(new.unbiased)
            learnt = Moments.of(learnt.mean_pair, learnt.variance, values, ddof)
        return select(untrained, start, _contract.load(new.approach, learnt, start))

    converted = over_members(convert, accepted)(memory.statistics, untrained, values)
    return (Remembered(converted, jnp.stack([accepted, memory.rejected], -1)),)


def _check_counted(
    new: BatchNorm, untrained: Bool[Array, "*members"], accepted: Int[Array, "*members"]
) -> None:
    """Raises `ValueError` for statistics of 0 batches, except those of untrained layers."""
    if _is_known_true((~untrained & (accepted == 0)).any()):
        raise ValueError(
            f"{new.approach} weighs the statistics by their number of batches, which is not "
            "known here. Give it: batches=n in reconfigure or swap."
        )


def _is_known_true(condition: Bool[Array, ""]) -> bool:
    """Returns the truth of a condition, `False` for one that `jax.jit` traces."""
    try:
        return bool(condition)
    except jax.errors.ConcretizationTypeError:
        return False


def checked_values(
    values: ArrayLike, members: tuple[int, ...], channels: int
) -> Float[Array, "..."]:
    """Returns the number of values for each member of an ensemble, or each of its channels;
    raises `ValueError` for another shape, and for numbers that are not finite and above 0."""
    if not (is_traced(values) or _are_positive(values)):
        each = ", or one for each member of the ensemble" if members else ""
        raise ValueError(
            f"values={values!r}: give the number of values per channel, a finite number above "
            f"0{each}."
        )
    numbers = jnp.asarray(values, float)
    of_each = jnp.asarray(expand_trailing_axes("values", numbers, (*members, channels)))
    if numbers.ndim > len(members):  # for each channel
        return of_each
    return jnp.broadcast_to(of_each.reshape(of_each.shape[:-1]), members)


def _are_positive(values: ArrayLike) -> bool:
    """Returns whether all values are numbers above 0, and finite in the default float dtype."""
    try:
        given = np.asarray(values)
    except ValueError:  # a list of lists of unequal lengths
        return False
    if given.dtype.kind not in "biuf":  # NumPy would read numbers in a text
        return False
    with np.errstate(over="ignore"):
        numbers = given.astype(jnp.result_type(float))
    return bool(np.all((numbers > 0) & np.isfinite(numbers)))


def new_statistics(layer: BatchNorm, like: PyTree) -> PyTree:
    """Returns what the layer's strategy remembers before any batch, complex if `like` is."""
    return layer.approach.init(layer.input_size, _memory.dtype_of(like))


def batches_of(layer: BatchNorm, memory: Remembered) -> Int[Array, "*members"]:
    """Returns how many batches, not micro-batches, a strategy has accepted."""
    return memory.accepted - layer.approach.without_pending(memory.statistics)[1]


def is_new(layer: BatchNorm, memory: Remembered) -> Bool[Array, ""]:
    """Returns whether a layer has accepted no batch; raises for another layer's memory."""
    _memory.check(layer, memory)
    start = new_statistics(layer, memory.statistics)
    core, _ = layer.approach.without_pending(memory.statistics)
    empty, _ = layer.approach.without_pending(start)
    if isinstance(core, Running):  # earlier versions began with a variance of 0
        return core.batches == 0
    pairs = zip(jax.tree.leaves(core), jax.tree.leaves(empty), strict=True)
    return jnp.all(jnp.asarray([jnp.all(a == b) for a, b in pairs]))


def _innermost(approach: AbstractStrategy[Any]) -> AbstractStrategy[Any]:
    """Returns the strategy inside of all wrappers."""
    while isinstance(approach, AbstractWrapper):
        approach = approach.strategy
    return approach


def _is_average(approach: AbstractStrategy[Any]) -> bool:
    """Returns whether a strategy infers from a `Running` and loads it as `Batch` does."""
    kind, base = type(approach), AbstractAveragingStrategy
    return kind.infer is base.infer and kind.load is base.load
