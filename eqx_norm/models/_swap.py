"""Defines `swap` and `unswap`, which replace Equinox's layers by this package's, and back."""

import dataclasses
import math
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqx_norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm, _memory
from eqx_norm._memory import Remembered
from eqx_norm.strategies import AbstractStrategy, Accumulated, Batch, Ema, Running, named

from ._carry import batches_of, is_new
from ._layers import (
    Model,
    Where,
    at_offset,
    chosen,
    copied,
    layers_of,
    over_members,
    replaced,
)
from ._reconfigure import reconfigure

# The norms of one example.
_TO_OURS: dict[Any, Any] = {
    eqx.nn.LayerNorm: LayerNorm,
    eqx.nn.GroupNorm: GroupNorm,
    eqx.nn.RMSNorm: RMSNorm,
}
_TO_THEIRS: dict[Any, Any] = {ours: theirs for theirs, ours in _TO_OURS.items()}
_TO_THEIRS |= {InstanceNorm: eqx.nn.GroupNorm}
_THEIRS, _OURS = (eqx.nn.BatchNorm, *_TO_OURS), (BatchNorm, *_TO_THEIRS)


def swap(
    model: Model,
    state: eqx.nn.State,
    approach: str | AbstractStrategy[Any] | None = None,
    *,
    where: Where | None = None,
    **overrides: Any,
) -> tuple[Model, eqx.nn.State]:
    r"""Returns the model with Equinox's norms replaced by this package's, and its state.

    Each `eqx.nn.BatchNorm`, `LayerNorm`, `GroupNorm` and `RMSNorm`, however nested, becomes the
    layer of that name in `eqx_norm`, with its weights, settings and statistics. The rest of the
    model and the state does not change. To use a checkpoint of a model with Equinox's layers,
    read it with these layers and swap them:

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
    $r_t$ is accurate to about 1e-7 / (1 - m) of the larger of 1 and the variance, because $h_t$
    is float32. Equinox's running mean starts at 0 and needs only the division by $w_t$.

    **Arguments:**

    - `model`, `state`: also of an ensemble; both stay valid.
    - `approach`: as `BatchNorm` takes it. By default it follows from each layer's `mode`.
    - `where`: a function of a layer's path, such as `layers[1].norm`, and the layer, which
        returns whether to swap it. By default all layers are swapped.
    - `overrides`: other settings, as `reconfigure` takes them.

    **Returns:** a new model and a new state, with the tree structure of a model made with this
    package's layers, so their checkpoints are interchangeable. Layers of this package do not
    change, and layers that share a state still share it.

    **Raises:** `ValueError` if there is no such layer, for a subclass (the message names it),
    for an invalid setting (`eps=0`), and for a state of another model.
    """
    if approach is not None:
        overrides["approach"] = approach
    what = (
        "norm of eqx.nn. (Norms of other packages cannot be swapped: use eqx_norm.BatchNorm "
        "where the model makes them.)"
    )
    layers = chosen(layers_of(model, _THEIRS), where, "swap", what)
    theirs = {path: layer for path, layer in layers.items() if not isinstance(layer, _OURS)}
    model, state = replaced(model, state, theirs, _ours, _carry)
    if not (overrides and theirs):
        return model, state
    return reconfigure(model, state, lambda path, _: path in theirs, **overrides)


def unswap(
    model: Model, state: eqx.nn.State, mode: str | None = None, *, where: Where | None = None
) -> tuple[Model, eqx.nn.State]:
    r"""Returns the model with this package's norms replaced by Equinox's, and its state.

    ```python
    model, state = unswap(model, state)
    eqx.tree_serialise_leaves(path, (model, state))     # for a program without this package
    ```

    **Statistics** are set such that inference in Equinox uses the same mean and variance.
    Equinox's `mode="batch"` divides them by $1 - m^t$, which is wrong for few batches (see
    `swap`). So `unswap` raises its count $t$ of batches until $1 - m^t$ rounds to 1, where it
    is below about 18 / (1 - m). Later batches then weigh less than they would have.

    **Arguments:**

    - `model`, `state`: as for `swap`, with layers of this package.
    - `mode`: `"batch"` or `"ema"`, for all layers. By default it follows from each layer's
        approach. The momentum is the approach's, or 0.99 if it has none.
    - `where`: as for `swap`; by default all layers of this package.

    **Returns:** a new model and a new state, with the tree structure of a model made with
    Equinox's layers. A layer that has seen no batch is as new. A `weight_offset` is added to
    the weight. Equinox's layers have no `unbiased`, `implementation`, `memory_axis_name` and
    counts of batches, so these are lost, and Equinox's known errors apply again.

    **Raises:** `ValueError` if there is no such layer, for an approach that Equinox lacks
    (unless `mode` is given), for an `activation`, `axis=0` or an `axis_name` of a norm of one
    example, for a subclass, and for a state of another model.
    """
    if mode not in (None, "batch", "ema"):
        raise ValueError(f"mode={mode!r}: eqx.nn.BatchNorm has mode='batch' and mode='ema'.")
    layers = chosen(layers_of(model, _OURS), where, "unswap", "layer of eqx_norm")
    return replaced(model, state, layers, lambda layer: _theirs(layer, mode), _carry_back)


def _refuse_subclass(layer: Any, kinds: tuple[type[Any], ...]) -> None:
    kind = type(layer)
    if kind not in kinds:
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} is a subclass, and its own behaviour would "
            "be lost. Leave it out: where=lambda path, layer: "
            f"type(layer).__name__ != {kind.__name__!r}."
        )


def _converted(layer: Any, kind: Any) -> Any:
    """Returns a norm of one example as a layer of another class, with the fields of both."""
    has_groups = kind in (GroupNorm, eqx.nn.GroupNorm)
    new = kind(1, 1, layer.eps) if has_groups else kind(1, layer.eps)
    names = {field.name for field in dataclasses.fields(new)}
    shared = [field.name for field in dataclasses.fields(layer) if field.name in names]
    return copied(new, **{name: getattr(layer, name) for name in shared})


def _ours(layer: Any) -> Any:
    _refuse_subclass(layer, _THEIRS)
    if kind := _TO_OURS.get(type(layer)):
        return _converted(layer, kind)
    settings = layer.axis_name, layer.eps, layer.channelwise_affine
    approach = named(layer.mode, layer.momentum)
    new = BatchNorm(layer.input_size, *settings, approach=approach)
    return copied(new, weight=layer.weight, bias=layer.bias, inference=layer.inference)


def _carry(old: eqx.nn.BatchNorm, new: BatchNorm, *entries: Any) -> tuple[Remembered]:
    """Returns the memory, given the count, or whether the layer is new, and the statistics."""
    if len(entries) != 2:
        raise ValueError(
            "eqx.nn.Shared shares an index of this layer, which swap cannot follow. Share the "
            "whole layer, or its weights."
        )
    count, (mean, variance) = entries

    def one(count: Array, mean: Array, variance: Array) -> Remembered:
        dtype = _memory.statistics_dtype(mean.dtype)
        empty = new.approach.init(old.input_size, dtype)
        fresh = (mean == 0).all() & (variance == int(old.mode == "batch")).all()
        if old.mode == "ema":  # it does not count
            fresh, count = fresh & count, jnp.zeros((), jnp.int32)
        learnt = Running.loaded(*_debiased(old.momentum, count, mean, variance))
        batches = jnp.where(count == 0, learnt.batches, count.astype(learnt.batches.dtype))
        fresh, learnt = fresh & (count == 0), learnt._replace(batches=batches)
        memory = jax.tree.map(lambda a, b: jnp.where(fresh, a, b), empty, learnt)
        return Remembered(memory, jnp.stack([count, 0 * count]).astype(jnp.int32))

    return (over_members(one, count)(count, mean, variance),)


def _debiased(
    momentum: float, count: Array, mean: Array, variance: Array
) -> tuple[Array, Array]:
    """Returns mean and variance of the statistics that `mode="batch"` has kept."""
    dtype = _memory.statistics_dtype(float)
    steps = count.astype(dtype)
    weight = jnp.where(count == 0, 1, -jnp.expm1(steps * math.log(momentum)))
    # The rest of the initial 1, which decays by the momentum in the dtype of the statistics.
    decay = max(float(np.asarray(momentum, variance.real.dtype)), math.ulp(0))
    with jax.numpy_dtype_promotion("standard"):
        started = jnp.where(count == 0, 0, jnp.exp(steps * math.log(decay)))
        variance = (variance.real.astype(dtype) - started) / weight
        mean = mean.astype(_memory.statistics_dtype(mean.dtype)) / weight
    return mean, jnp.maximum(variance, 0)


def _theirs(layer: Any, mode: str | None) -> Any:
    _refuse_subclass(layer, _OURS)
    if layer.activation is not None:
        raise ValueError(
            f"activation={layer.activation}: Equinox's layer has none. Remove it by "
            "eqx_norm.models.reconfigure(model, state, activation=None), and apply it yourself."
        )
    layer = at_offset(layer, 0.0)
    if kind := _TO_THEIRS.get(type(layer)):
        for name, default in (("axis", None), ("axis_name", ())):
            if (value := getattr(layer, name, default)) != default:
                raise ValueError(
                    f"{name}={value!r}: Equinox's layer has none. Leave this one out by where=."
                )
        return _converted(layer, kind)
    new = eqx.nn.BatchNorm(
        layer.input_size,
        layer.axis_name,
        layer.eps,
        layer.channelwise_affine,
        0.99 if layer.momentum is None else layer.momentum,
        mode=cast(Any, _mode(layer) if mode is None else mode),
    )
    return copied(new, weight=layer.weight, bias=layer.bias, inference=layer.inference)


def _mode(layer: BatchNorm) -> str:
    approach: Any = layer.approach
    kind = type(approach.strategy if type(approach) is Accumulated else approach)
    if kind in (Batch, Ema):
        return "ema" if kind is Ema else "batch"
    raise ValueError(
        f"approach={layer.approach}: eqx.nn.BatchNorm has no such approach. Choose how it "
        "trains there by unswap(..., mode='batch') or mode='ema'; inference stays the same."
    )


def _carry_back(
    old: BatchNorm, new: eqx.nn.BatchNorm, memory: Remembered
) -> tuple[Array, tuple[Array, Array]]:
    """Returns the count, or whether the layer is new, and the statistics."""
    bits = jnp.finfo(float).nmant + 3
    # After so many batches 1 - m^t rounds to 1.
    many = min(math.ceil(-bits * math.log(2) / math.log(new.momentum)), 2**31 - 1)

    def one(memory: Remembered, accepted: Array) -> tuple[Array, tuple[Array, Array]]:
        count = fresh = is_new(old, memory)
        moments = old.approach.infer(memory.statistics)
        mean, variance = moments.mean, moments.variance
        if new.mode == "ema":
            variance = jnp.where(fresh, 0, variance)
        else:
            count = jnp.where(fresh, 0, jnp.maximum(accepted, many))
            count = count.astype(jnp.result_type(int))
        return count, (mean, variance.astype(mean.dtype))

    batches = batches_of(old, memory)
    return over_members(one, batches)(memory, batches)
