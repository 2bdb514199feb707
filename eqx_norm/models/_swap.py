"""Defines `swap`: Equinox's normalisation layers in a model become those of this package."""

import dataclasses
import math
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqx_norm import _memory
from eqx_norm._batch_norm import BatchNorm
from eqx_norm._layer_norm import LayerNorm
from eqx_norm.strategies import AbstractStrategy, Running, named

from ._carried import each_member
from ._indices import Renamed, index
from ._layers import each, entries, found, state_of
from ._reconfigure import check, located, reset

Model = TypeVar("Model")

_THEIRS = (eqx.nn.BatchNorm, eqx.nn.LayerNorm)
_OURS = (BatchNorm, LayerNorm)


def swap(
    model: Model,
    state: eqx.nn.State,
    approach: str | AbstractStrategy[Any] | None = None,
    *,
    keep_inference: bool = False,
    subclasses: bool = False,
    **overrides: Any,
) -> tuple[Model, eqx.nn.State]:
    r"""Returns the model with the layers of this package in place of Equinox's, and its state.

    Each `eqx.nn.BatchNorm` and `eqx.nn.LayerNorm`, however nested, becomes an
    `eqx_norm.BatchNorm` or `eqx_norm.LayerNorm` with its weights, settings and statistics; the
    rest of model and state stays as it is. A checkpoint that was written with Equinox's
    layers is read with these, and swapped:

    ```python
    model, state = eqx.nn.make_with_state(build)(key)
    model, state = eqx.tree_deserialise_leaves(path, (model, state))
    model, state = swap(model, state)
    ```

    **Statistics.** Those of `mode="ema"` are taken as they are. Equinox's `mode="batch"` starts
    its running variance $h$ at 1 and divides it at inference as if it had started at 0. After
    $t$ batches, with momentum $m$,

    $$h_t = m^t + (1 - m^t)\, r_t \quad\Rightarrow\quad
      r_t = \frac{h_t - m^t}{1 - m^t}, \qquad w_t = 1 - m^t,$$

    where $r_t$ is the average of the batches' variances, and $w_t$ the weight that further
    batches are averaged with. $r_t$ is had to about 1e-7 / (1 - m) of the larger of 1 and the
    variance, from statistics in float32: that is what $h_t$ has kept of it. The mean has
    started at 0, and is right. Where the count of batches is 0, and yet there are statistics
    (PyTorch's, put there), they are taken as they are.

    **Arguments:**

    - `model`, `state`: as `eqx.nn.make_with_state` made them, or as training has left them; an
        ensemble, too. Both stay as they are, and valid.
    - `approach`: as `BatchNorm` takes it; that of the layer's `mode` unless given.
    - `keep_inference`: takes the statistics by which Equinox's inference normalises, to the
        bit, wrong as they are after few batches.
    - `subclasses`: swaps layers of a subclass of `eqx.nn.BatchNorm` or `eqx.nn.LayerNorm` that
        is not known here, too. What fields and methods they have of their own is lost.
    - `overrides`: other settings, as `reconfigure` takes them.

    **Returns:** a new model and a new state, of the tree structure of those that are made with
    the layers of this package: checkpoints of the two are the same. `swapped` lists what has
    changed, `unswap` is the way back. Layers that are of this package already are left alone,
    and layers that share a state still do.

    **Raises:** `ValueError` for a subclass, by name, unless `subclasses`; for a setting that
    makes no sense here (`eps=0`); and for a state that is not the model's.
    """
    if approach is not None:
        overrides["approach"] = approach
    check(overrides)
    held = entries(state)
    names = Renamed(("memory_index", "accepted_index", "rejected_index"))
    old: set[Any] = set()
    new: dict[Any, Any] = {}

    def ours(path: str, layer: Any) -> Any:
        if isinstance(layer, _OURS):
            return layer
        if type(layer) not in _THEIRS and not subclasses:
            raise ValueError(_of_subclass(path, layer))
        with located(path, layer):
            if isinstance(layer, eqx.nn.LayerNorm):
                return _row(layer)
            field, theirs = _indices(layer)
            if missing := [i.marker for i in theirs if i.marker not in held]:
                raise ValueError(
                    f"the state given holds nothing at {missing[0]!r}: it was made for another "
                    "model. Give the one that was made, or returned, with this model."
                )
            markers = names(theirs[1].marker, field)
            made = _layer(layer, markers)
            count, statistics = (held[i.marker] for i in theirs)
            values = _values(layer, count, statistics, keep_inference)
            old.update(i.marker for i in theirs)
            new.update(zip(markers.values(), values, strict=True))
            return made

    already = set(found(model, _OURS))
    model = each(model, _THEIRS, ours)
    held = {marker: value for marker, value in held.items() if marker not in old}
    state = state_of(model, held | new)
    return reset(model, state, lambda path, layer: {} if path in already else overrides)


def swapped(before: Any, after: Any) -> dict[str, str]:
    """Returns what kind of normalisation layer has become which, by the paths of the layers.

    ```python
    for path, kinds in swapped(before, after).items():
        print(path, kinds)
    ```

    **Arguments:** `before`, `after`: a model before and after `swap`, `unswap` or
    `reconfigure`.

    **Returns:** one entry for each layer that is not what it was, as `layers[1].norm`:
    `eqx.nn.BatchNorm(mode='ema') -> eqx_norm.BatchNorm(approach=Ema(momentum=0.99))`.
    """
    layers = found(before, _THEIRS), found(after, _THEIRS)
    kinds = [{path: _kind(layer) for path, layer in part.items()} for part in layers]
    return {
        path: f"{kind} -> {kinds[1][path]}"
        for path, kind in kinds[0].items()
        if path in kinds[1] and kind != kinds[1][path]
    }


def _kind(layer: Any) -> str:
    name = type(layer).__qualname__
    if isinstance(layer, BatchNorm):
        return f"eqx_norm.{name}(approach={layer.approach})"
    if isinstance(layer, LayerNorm):
        return f"eqx_norm.{name}()"
    name = f"eqx.nn.{name}" if type(layer) in _THEIRS else name
    return f"{name}({f'mode={layer.mode!r}' if isinstance(layer, eqx.nn.BatchNorm) else ''})"


def _of_subclass(path: str, layer: Any) -> str:
    kind, base = type(layer), next(c for c in _THEIRS if isinstance(layer, c))
    own = {field.name for field in dataclasses.fields(layer)}
    own -= {field.name for field in dataclasses.fields(base)}
    fields = f", with the fields {', '.join(sorted(own))}" if own else ""
    return (
        f"{path or kind.__name__}: {kind.__module__}.{kind.__qualname__} is a subclass of "
        f"eqx.nn.{base.__name__}{fields}. What it does differently would be lost. To swap it "
        "all the same, give subclasses=True; or derive it from "
        f"eqx_norm.{base.__name__}, which is left alone."
    )


def _indices(layer: eqx.nn.BatchNorm) -> tuple[str, tuple[Any, Any]]:
    """Returns the name of the index of the statistics, and those of count and statistics."""
    field = "ema_state_index" if layer.mode == "ema" else "batch_state_index"
    count = "ema_first_time_index" if layer.mode == "ema" else "batch_counter"
    indices = getattr(layer, count), getattr(layer, field)
    if not all(isinstance(i, eqx.nn.StateIndex) for i in indices):
        raise ValueError(
            f"its {field} is {indices[1]!r}, not an eqx.nn.StateIndex. eqx.nn.Shared can share "
            "the whole layer, or its weight and bias: swap knows what becomes of these."
        )
    return field, indices


def _layer(layer: eqx.nn.BatchNorm, markers: dict[str, Any]) -> BatchNorm:
    new = BatchNorm(
        layer.input_size,
        layer.axis_name,
        layer.eps,
        layer.channelwise_affine,
        approach=named(layer.mode, layer.momentum),
    )
    arrays = ("weight", "bias", "inference")
    return eqx.tree_at(
        lambda norm: [getattr(norm, name) for name in (*arrays, *markers)],
        new,
        [getattr(layer, name) for name in arrays] + [index(m) for m in markers.values()],
        is_leaf=lambda node: node is None or isinstance(node, eqx.nn.StateIndex),
    )


def _row(layer: eqx.nn.LayerNorm) -> LayerNorm:
    return eqx.tree_at(
        lambda norm: [norm.weight, norm.bias],
        LayerNorm(layer.shape, layer.eps, layer.use_weight, layer.use_bias),
        [layer.weight, layer.bias],
        is_leaf=lambda node: node is None,
    )


def _values(
    layer: eqx.nn.BatchNorm, count: Array, statistics: tuple[Array, Array], keep: bool
) -> tuple[Running, Array, Array]:
    """Returns the memory, and how many batches were accepted and rejected."""

    def one(count: Array, mean: Array, variance: Array) -> tuple[Running, Array, Array]:
        dtype = _memory.statistics_dtype(mean.dtype)
        new = (mean == 0).all() & (variance == int(layer.mode == "batch")).all()
        if layer.mode == "ema":
            new, steps = new & count, jnp.zeros((), jnp.int32)
            weight = jnp.ones((), jnp.finfo(dtype).dtype)
        else:
            new, steps = new & (count == 0), count.astype(jnp.int32)
            mean, variance, weight = _debiased(layer.momentum, count, mean, variance, keep)
        learnt = Running(mean.astype(dtype), variance.real.astype(weight.dtype), weight)
        empty = Running.empty(mean.shape[0], dtype)
        memory = jax.tree.map(lambda a, b: jnp.where(new, a, b), empty, learnt)
        return memory, steps, jnp.zeros((), jnp.int32)

    mean, variance = statistics
    return each_member(one, mean.ndim - 1)(count, mean, variance)


def _debiased(
    momentum: float, count: Array, mean: Array, variance: Array, keep: bool
) -> tuple[Array, Array, Array]:
    """Returns mean, variance and weight of the statistics that `mode="batch"` has kept."""
    dtype = _memory.statistics_dtype(float)
    steps = count.astype(dtype)
    weight = jnp.where(count == 0, 1, -jnp.expm1(steps * math.log(momentum)))
    with jax.numpy_dtype_promotion("standard"):
        if keep:
            scale = jnp.where(count == 0, 1, 1 - momentum**count)  # Equinox's own formula
            return mean / scale, variance / scale, weight
        # What is left of the 1: its decay is the momentum in the dtype of the statistics.
        decay = max(float(np.asarray(momentum, variance.real.dtype)), math.ulp(0))
        started = jnp.where(count == 0, 0, jnp.exp(steps * math.log(decay)))
        variance = (variance.real.astype(dtype) - started) / weight
        mean = mean.astype(_memory.statistics_dtype(mean.dtype)) / weight
    return mean, jnp.maximum(variance, 0), weight
