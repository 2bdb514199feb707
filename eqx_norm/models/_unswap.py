"""Defines `unswap`, which replaces this package's norms by Equinox's."""

import functools
import math
from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, Shaped

from eqx_norm import BatchNorm, _contract
from eqx_norm._memory import Remembered
from eqx_norm.strategies import Accumulated, Batch, Ema

from . import _layers
from ._carry import batches_of, is_new
from ._layers import Model, State, Where
from ._swap import OURS, TO_THEIRS, converted, refuse_subclass

Mode = Literal["batch", "ema"]
# The mean and variance of a layer, or of the members of an ensemble.
Statistics = tuple[Inexact[Array, "*members channels"], Inexact[Array, "*members channels"]]


def unswap(
    model: Model,
    state: State = None,  # pyright: ignore[reportArgumentType] (see `State`)
    mode: str | None = None,
    *,
    where: Where | None = None,
) -> tuple[Model, State]:
    r"""Returns the model with this package's norms replaced by Equinox's, and its state.

    ```python
    model, state = unswap(model, state)
    eqx.tree_serialise_leaves(path, (model, state))     # for a program without this package
    ```

    **Statistics** are set such that inference in Equinox uses the same mean and variance.
    Equinox's `mode="batch"` divides them by $1 - m^t$, which is wrong for few batches (see
    `swap`). If the count $t$ of batches is below about 18 / (1 - m), `unswap` therefore raises
    it until $1 - m^t$ rounds to 1. Later batches then weigh less than with the original count.

    **Arguments:**

    - `model`, `state`: as for `swap`, with layers of this package.
    - `mode`: `"batch"` or `"ema"`, for all layers. By default it follows from each layer's
        approach. The momentum is the approach's, or 0.99 if it has none.
    - `where`: as for `swap`; by default all layers of this package.

    **Returns:** a new model and a new state, with the tree structure of a model made with
    Equinox's layers. A layer without batches becomes a new layer. A `weight_offset` is added to
    the weight. A list of axis names, which `swap` has made a tuple, stays a tuple. Equinox's
    layers have no `unbiased`, `implementation`, `memory_axis_name` and counts of batches, so
    these are lost, and Equinox's known errors apply again.

    **Raises:** `ValueError` if there is no such layer, for an approach that Equinox lacks
    (unless `mode` is given), for an `activation`, `axis=0` or an `axis_name` of a norm of one
    example, for a subclass, and for a state of another model.
    """
    if mode not in (None, "batch", "ema"):
        raise ValueError(f"mode={mode!r}: eqx.nn.BatchNorm has mode='batch' and mode='ema'.")
    layers = _layers.chosen(model, OURS, where, "unswap", "layer of eqx_norm")
    theirs = functools.partial(_theirs, mode=mode)
    return _layers.replaced(model, state, layers, theirs, _carry_back)


def _theirs(layer: PyTree, mode: Mode | None) -> PyTree:
    refuse_subclass(layer, OURS)
    if layer.activation is not None:
        raise ValueError(
            f"activation={layer.activation}: Equinox's layer has none. Remove it by "
            "eqx_norm.models.reconfigure(model, state, activation=None), and apply it yourself."
        )
    layer = _layers.with_weight_offset(layer, 0.0)
    kind = TO_THEIRS.get(type(layer))
    if kind is not None:
        for name, default in (("axis", None), ("axis_name", ())):
            value = getattr(layer, name, default)
            if value != default:
                raise ValueError(
                    f"{name}={value!r}: Equinox's layer has none. Leave this one out by where=."
                )
        return converted(layer, kind)
    new = eqx.nn.BatchNorm(
        layer.input_size,
        layer.axis_name,
        layer.eps,
        layer.channelwise_affine,
        0.99 if layer.momentum is None else layer.momentum,
        mode=_mode(layer) if mode is None else mode,
    )
    return _layers.copied(new, weight=layer.weight, bias=layer.bias, inference=layer.inference)


def _mode(layer: BatchNorm) -> Mode:
    approach = layer.approach
    if type(approach) is Accumulated:
        approach = approach.strategy
    if type(approach) is Batch:
        return "batch"
    if type(approach) is Ema:
        return "ema"
    raise ValueError(
        f"approach={layer.approach}: eqx.nn.BatchNorm has no such approach. Choose how it "
        "trains there by unswap(..., mode='batch') or mode='ema'; inference stays the same."
    )


def _carry_back(
    old: BatchNorm, new: eqx.nn.BatchNorm, memory: Remembered
) -> tuple[Shaped[Array, "*members"], Statistics]:
    """Returns the count (`ema`: whether the layer is new) and the statistics."""
    bits = jnp.finfo(float).nmant + 3
    # After this number of batches, 1 - m^t rounds to 1.
    many = min(math.ceil(-bits * math.log(2) / math.log(new.momentum)), 2**31 - 1)

    def convert(
        memory: Remembered, accepted: Int[Array, ""]
    ) -> tuple[Shaped[Array, ""], Statistics]:
        is_untrained = is_new(old, memory)
        moments = _contract.running(old, memory.statistics)
        mean = moments.mean
        variance = moments.variance.astype(mean.dtype)
        if new.mode == "ema":
            return is_untrained, (mean, jnp.where(is_untrained, 0, variance))
        count = jnp.where(is_untrained, 0, jnp.maximum(accepted, many))
        return count.astype(jnp.result_type(int)), (mean, variance)

    batches = batches_of(old, memory)
    return _layers.over_members(convert, batches)(memory, batches)
