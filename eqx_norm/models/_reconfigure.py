"""Defines `reconfigure`, which changes settings of existing layers and keeps statistics."""

import dataclasses
import functools
from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import ArrayLike

from eqx_norm._arguments import checked_activation
from eqx_norm._batch_norm import BatchNorm
from eqx_norm._example import AbstractExampleNorm
from eqx_norm._layer_norm import LayerNorm
from eqx_norm.strategies import AbstractStrategy

from . import _layers
from ._carry import carry
from ._freeze import freeze, is_frozen, without_frozen
from ._layers import Model, State, Where

Settings = dict[str, Any]  # the keyword arguments of `reconfigure`, by name
Norm = TypeVar("Norm", bound=BatchNorm | AbstractExampleNorm)
_OURS = BatchNorm, AbstractExampleNorm
_OF_ALL = ("eps", "activation", "weight_offset", "implementation")
_OF_BATCH_NORM = ("approach", "momentum", "unbiased", "axis_name", "memory_axis_name")


def reconfigure(
    model: Model,
    state: State = None,  # pyright: ignore[reportArgumentType] (see `State`)
    where: Where | None = None,
    *,
    values: ArrayLike | None = None,
    batches: int | None = None,
    **settings: Any,
) -> tuple[Model, State]:
    """Returns the model with other settings in its layers, and a state that fits them.

    ```python
    model, state = reconfigure(model, state, approach="renorm", momentum=0.9)
    first = lambda path, layer: path == "layers[1]"
    model, state = reconfigure(model, state, first, activation=jax.nn.relu)
    ```

    **Arguments:**

    - `model`, `state`: also of an ensemble; both stay valid. Leave `state` out for a model that
        has none, and for the state of an optimiser, which has the structure of the model:
        `opt_state, _ = reconfigure(opt_state, momentum=0.9)`. The state returned is `None`.
    - `where`: a function of a layer's path, such as `layers[1].norm`, and the layer, which
        returns whether to change it. By default all layers of this package are changed. Layers
        that share an entry of the state must change their approach together.
    - `values`: the number of values per channel in the running statistics, by which
        `Cumulative` weighs them. Needed if the old approach, a running average, does not know.
    - `batches`: their number of batches, the new count `accepted`, by which `Average` weighs
        them. Needed if that count is 0, as after `swap` from `mode="ema"`.
    - `settings`: `approach`, `momentum`, `eps`, `unbiased`, `activation`, `implementation`,
        `weight_offset`, `axis_name` and `memory_axis_name`, as `BatchNorm` takes them. The
        other layers have `eps`, `activation`, `implementation` and `weight_offset`, and ignore
        the rest. A new `weight_offset` changes the weight, not the outputs. An approach given
        by name keeps the layer's momentum. `approach` may also be a function of the layer's
        strategy: `approach=lambda strategy: Accumulated(strategy, every=4)`. A frozen layer
        stays frozen: its approach changes inside of `Frozen`; `unfreeze` makes it train.

    **Returns:** a new model and a new state, with the tree structure of a model made with these
    settings. The running statistics are carried over, so inference gives the same results; a
    layer that has seen no batch becomes a new layer. Between named approaches the memory (the
    strategy's running statistics) stays bitwise equal; other strategies `load` the statistics.
    A new `unbiased=` applies to later batches only, with `Cumulative` to all values.

    **Raises:** `ValueError` if no layer is chosen, for a setting that no chosen layer has, for
    an invalid value, for `values` or `batches` that are needed, or have no new approach, for a
    strategy without `load`, for a missing state and that of another model. In a tree without
    batch norms, an optimiser's memory cannot be told from a model: leave `weight_offset` out.
    """
    what = "layer of eqx_norm; eqx_norm.models.swap(model, state) makes some of eqx.nn's"
    layers = _layers.chosen(model, _OURS, where, "reconfigure", what)
    has_batches = any(isinstance(layer, BatchNorm) for layer in layers.values())
    known = sorted(_OF_ALL + (_OF_BATCH_NORM if has_batches else ()))
    if unknown := [name for name in settings if name not in known]:
        raise ValueError(
            f"{unknown[0]}= cannot be changed in the layers that were chosen, only "
            f"{', '.join(known)}. Use eqx.tree_at for weights, and eqx.nn.inference_mode for "
            "training and inference mode."
        )
    parts = [_layers.is_part(norm) for norm in _layers.layers_of(model, BatchNorm).values()]
    if any(parts):
        if not all(parts):
            raise ValueError(
                "The tree holds a model, and a gradient or an optimiser's memory, whose layers "
                "have no flag inference. Reconfigure each by itself."
            )
        settings = _of_arrays(settings, layers)
    carrying = functools.partial(carry, values=values, batches=batches)
    changing = functools.partial(_changed, settings=settings)
    return _layers.replaced(model, state, layers, changing, carrying)


def _of_arrays(settings: Settings, layers: _layers.Nodes) -> Settings:
    """Returns the settings for a gradient or an optimiser's memory, which hold no functions.
    Raises `ValueError` for settings that change the arrays of the model."""
    offset = settings.get("weight_offset")
    activation = settings.get("activation")
    changes_weights = offset is not None and any(
        layer.weight_offset != offset for layer in layers.values()
    )
    if changes_weights or jax.tree.leaves(eqx.filter(activation, eqx.is_inexact_array)):
        raise ValueError(
            "weight_offset=, and an activation= with arrays, change the arrays of a model, and "
            "this is a gradient or an optimiser's memory: its layers have no flag inference. "
            "Make a memory anew, like = optimiser.init(eqx.filter(model, "
            "eqx.is_inexact_array)), after weight_offset= with the numbers of the old one: "
            "jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(memory))."
        )
    if checked_activation(activation) is not None:
        settings = settings | {"activation": None}
    return settings


def _changed(layer: Norm, settings: Settings) -> Norm:
    """Returns the layer with other settings, checked as for a new layer."""
    settings = {"weight_offset": layer.weight_offset} | settings
    if isinstance(layer, BatchNorm):
        names = {"axis_name": layer.axis_name, "memory_axis_name": layer.memory_axis_name}
        settings = _with_approach(layer, names | settings)
        fresh = BatchNorm(layer.input_size, **settings)
    else:
        settings = {name: value for name, value in settings.items() if name in _OF_ALL}
        fresh = LayerNorm(1, **settings)
    changed = _layers.with_weight_offset(layer, fresh.weight_offset)
    changed = _layers.copied(changed, **{name: getattr(fresh, name) for name in settings})
    if is_frozen(layer) and changed.approach.learns:
        return freeze(changed, weights=not layer.approach.trains_weights)
    return changed


def _with_approach(layer: BatchNorm, settings: Settings) -> Settings:
    """Returns the settings with a strategy as the approach, or a name and its momentum."""
    strategy = without_frozen(layer.approach)
    approach = settings.get("approach", strategy)
    if callable(approach) and not isinstance(approach, type):
        approach = approach(strategy)
    if approach is None:
        raise ValueError(
            "approach= is None, or a function that returned None: give a name, a strategy "
            "object, or a function that returns one."
        )
    if isinstance(approach, str):
        settings = {"momentum": layer.momentum} | settings
    elif "momentum" in settings and isinstance(approach, AbstractStrategy):
        approach = _with_momentum(approach, settings["momentum"])
        settings = {name: value for name, value in settings.items() if name != "momentum"}
    return settings | {"approach": approach}


def _with_momentum(approach: AbstractStrategy[Any], momentum: float) -> AbstractStrategy[Any]:
    """Returns the strategy, or the one that it wraps, with another momentum."""
    names = {field.name for field in dataclasses.fields(approach)}
    if "momentum" in names:
        return dataclasses.replace(approach, momentum=momentum)
    inner = getattr(approach, "strategy", None)
    if isinstance(inner, AbstractStrategy):
        return dataclasses.replace(approach, strategy=_with_momentum(inner, momentum))
    raise ValueError(
        f"momentum={momentum!r}: the approach {approach} has no momentum. Leave momentum= out, "
        "or pass an approach that has one."
    )
