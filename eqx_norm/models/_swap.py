"""Defines `swap`, which replaces Equinox's norms by this package's."""

import dataclasses
import math
import re
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Inexact, Int, PyTree, Shaped

from eqx_norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm, _memory
from eqx_norm._memory import Remembered
from eqx_norm._warnings import stacklevel
from eqx_norm.strategies import AbstractStrategy, Running, named
from eqx_norm.strategies._moments import select

from . import _layers
from ._fold import FoldedBatchNorm
from ._layers import NORMS, Model, State, Where, chosen, copied, over_members, replaced
from ._reconfigure import reconfigure

# Maps Equinox's norms of one example to this package's.
TO_OURS: dict[type, type] = {
    eqx.nn.LayerNorm: LayerNorm,
    eqx.nn.GroupNorm: GroupNorm,
    eqx.nn.RMSNorm: RMSNorm,
}
TO_THEIRS: dict[type, type] = {ours: theirs for theirs, ours in TO_OURS.items()}
TO_THEIRS |= {InstanceNorm: eqx.nn.GroupNorm}
OURS = (BatchNorm, *TO_THEIRS)


def swap(
    model: Model,
    state: State = None,  # pyright: ignore[reportArgumentType] (see `State`)
    approach: str | AbstractStrategy[Any] | None = None,
    *,
    where: Where | None = None,
    **overrides: Any,
) -> tuple[Model, State]:
    r"""Returns the model with Equinox's norms replaced by this package's, and its state.

    Each `eqx.nn.BatchNorm`, `LayerNorm`, `GroupNorm` and `RMSNorm`, however nested, becomes the
    layer of that name in `eqx_norm`, with its weights, settings and statistics. The rest of the
    model and the state does not change. To use a checkpoint of a model with Equinox's layers,
    read the checkpoint into that model, and then swap the layers:

    ```python
    model, state = eqx.nn.make_with_state(build)(key)
    model, state = eqx.tree_deserialise_leaves(path, (model, state))
    model, state = swap(model, state)
    ```

    **Statistics** of `mode="ema"`, and statistics with a count of 0 batches (copied from
    PyTorch), are used unchanged. Equinox's `mode="batch"` starts its running variance $h$ at 1
    and divides it at inference as if it had started at 0. After $t$ batches, with momentum $m$,

    $$h_t = m^t + (1 - m^t)\, r_t \quad\Rightarrow\quad
      r_t = \frac{h_t - m^t}{1 - m^t}, \qquad w_t = 1 - m^t,$$

    where $r_t$ is the average of the batches' variances and $w_t$ its weight in later averages.
    The error of $r_t$ is about 1e-7 / (1 - m) times the larger of 1 and the variance, because
    $h_t$ is float32. Equinox's running mean starts at 0 and needs only the division by $w_t$.

    **Arguments:**

    - `model`, `state`: also of an ensemble; both stay valid. Leave `state` out for a model that
        has none; the state returned is then `None`.
    - `approach`: as `BatchNorm` takes it. By default it follows from each layer's `mode`.
    - `where`: a function of a layer's path, such as `layers[1].norm`, and the layer, which
        returns whether to swap it. By default all layers are swapped.
    - `overrides`: other settings, as `reconfigure` takes them.

    **Returns:** a new model and a new state, with the tree structure of a model made with this
    package's layers, so their checkpoints are interchangeable. Layers of this package do not
    change, and layers that share a state still share it.

    **Raises:** `ValueError` if there is no such layer, for a subclass (the message names it),
    for an invalid setting (`eps=0`), and for a state of another model.

    **Warns** of layers of other packages that stay, although their class is named like a norm,
    as `LayerNorm2d` is. With any `where` there is no warning.
    """
    if approach is not None:
        overrides["approach"] = approach
    what = (
        "norm of eqx.nn. Replace the norms of other packages where the model makes them, or as "
        "docs/home_made_norms.md shows"
    )
    layers = chosen(model, NORMS, where, "swap", what)
    theirs = {path: layer for path, layer in layers.items() if not isinstance(layer, OURS)}
    model, state = replaced(model, state, theirs, _ours, _carry)
    if where is None:
        _warn_of_other_norms(model)
    if not (overrides and theirs):
        return model, state
    return reconfigure(model, state, lambda path, _: path in theirs, **overrides)


def _warn_of_other_norms(model: PyTree) -> None:

    def is_norm(node: PyTree) -> bool:
        return isinstance(node, NORMS) or _is_other_norm(node)

    others = list[str]()
    for keys, node in jtu.tree_leaves_with_path(model, is_leaf=is_norm):
        if _is_other_norm(node):
            others.append(f"{_layers.path_of(keys)} ({type(node).__name__})")
    if others:
        warnings.warn(
            f"swap replaces only norms of eqx.nn, and left {_layers.listed(others)}. Replace "
            "these as docs/home_made_norms.md shows, or say that they stay: "
            "swap(..., where=lambda path, layer: True).",
            stacklevel=stacklevel(),
        )


def _is_other_norm(node: PyTree) -> bool:
    """Returns whether a module is a layer named like a norm, not of `eqx.nn` or this package,
    without layers inside, which `eqx.nn.WeightNorm` and blocks of layers have."""
    if not isinstance(node, eqx.Module) or isinstance(node, (*NORMS, FoldedBatchNorm)):
        return False

    def is_inner(inner: PyTree) -> bool:
        is_module = isinstance(inner, eqx.Module) and not isinstance(inner, eqx.nn.StateIndex)
        return is_module and inner is not node

    is_named_so = re.search(r"norm(\d+d)?$", type(node).__name__, re.IGNORECASE) is not None
    has_layers = any(map(is_inner, jax.tree.leaves(node, is_leaf=is_inner)))
    return is_named_so and callable(node) and not has_layers


def refuse_subclass(layer: PyTree, kinds: tuple[type, ...]) -> None:
    kind = type(layer)
    if kind not in kinds:
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} is a subclass, and its own behaviour would "
            "be lost. Leave it out: where=lambda path, layer: "
            f"type(layer).__name__ != {kind.__name__!r}."
        )


def converted(layer: PyTree, kind: type) -> PyTree:
    """Converts a norm of one example to another class, with the fields that both share."""
    has_groups = kind in (GroupNorm, eqx.nn.GroupNorm)
    new = kind(1, 1, layer.eps) if has_groups else kind(1, layer.eps)
    names = {field.name for field in dataclasses.fields(new)}
    shared = [field.name for field in dataclasses.fields(layer) if field.name in names]
    return copied(new, **{name: getattr(layer, name) for name in shared})


def _ours(layer: PyTree) -> PyTree:
    refuse_subclass(layer, NORMS)
    kind = TO_OURS.get(type(layer))
    if kind is not None:
        return converted(layer, kind)
    settings = layer.axis_name, layer.eps, layer.channelwise_affine
    approach = named(layer.mode, layer.momentum)
    new = BatchNorm(layer.input_size, *settings, approach=approach)
    return copied(new, weight=layer.weight, bias=layer.bias, inference=layer.inference)


def _carry(old: eqx.nn.BatchNorm, new: BatchNorm, *entries: PyTree) -> tuple[Remembered]:
    """Returns the memory, given the count (`ema`: whether the layer is new) and statistics."""
    if len(entries) != 2:
        raise ValueError(
            "eqx.nn.Shared shares an index of this layer, which swap cannot follow. Share the "
            "whole layer, or its weights."
        )
    count, (mean, variance) = entries

    def convert(
        count: Shaped[Array, ""],
        mean: Inexact[Array, " channels"],
        variance: Inexact[Array, " channels"],
    ) -> Remembered:
        dtype = _memory.statistics_dtype(mean.dtype)
        empty = new.approach.init(old.input_size, dtype)
        initial = 1 if old.mode == "batch" else 0
        is_untrained = (mean == 0).all() & (variance == initial).all()
        if old.mode == "ema":  # has no count of batches
            is_untrained &= count
            count = jnp.zeros((), jnp.int32)
        is_untrained &= count == 0
        learnt = Running.loaded(*_debiased(old.momentum, count, mean, variance))
        batches = jnp.where(count == 0, learnt.batches, count.astype(learnt.batches.dtype))
        memory = select(is_untrained, empty, learnt._replace(batches=batches))
        return Remembered(memory, jnp.stack([count, jnp.zeros_like(count)]).astype(jnp.int32))

    return (over_members(convert, count)(count, mean, variance),)


def _debiased(
    momentum: float,
    count: Int[Array, ""],
    mean: Inexact[Array, " channels"],
    variance: Inexact[Array, " channels"],
) -> tuple[Inexact[Array, " channels"], Float[Array, " channels"]]:
    """Returns the debiased mean and variance for the statistics that `mode="batch"` stores."""
    dtype = _memory.statistics_dtype(float)
    steps = count.astype(dtype)
    weight = jnp.where(count == 0, 1, -jnp.expm1(steps * math.log(momentum)))
    # The initial 1 decays by the momentum, rounded to the dtype of the statistics.
    decay = max(float(np.asarray(momentum, variance.real.dtype)), math.ulp(0))
    with jax.numpy_dtype_promotion("standard"):
        started = jnp.where(count == 0, 0, jnp.exp(steps * math.log(decay)))
        variance = (variance.real.astype(dtype) - started) / weight
        mean = mean.astype(_memory.statistics_dtype(mean.dtype)) / weight
    return mean, jnp.maximum(variance, 0)
