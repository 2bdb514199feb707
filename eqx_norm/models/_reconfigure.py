"""Defines `reconfigure`: layers that exist get other settings, and a memory that fits."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import equinox as eqx

from eqx_norm._batch_norm import BatchNorm
from eqx_norm._layer_norm import LayerNorm

from ._carried import carried
from ._layers import each, entries, found, rebuilt, state_of

Model = TypeVar("Model")
Layer = BatchNorm | LayerNorm
Where = Callable[[str, Any], Any]

_OF_ROWS = ("eps", "activation", "implementation")
_OF_BATCHES = (*_OF_ROWS, "approach", "momentum", "unbiased", "axis_name")


def reconfigure(
    model: Model, state: eqx.nn.State, where: Where | None = None, **settings: Any
) -> tuple[Model, eqx.nn.State]:
    """Returns the model with other settings of its layers, and a state that fits them.

    (`eqx.tree_at` on a layer's `approach` leaves its `momentum` and its memory those of the old
    one; `dataclasses.replace` does not work on a layer.)

    ```python
    model, state = reconfigure(model, state, approach="smooth_start", momentum=0.9)


    def first(path, layer):
        return path == "layers[1]"


    model, state = reconfigure(model, state, first, activation=jax.nn.relu)
    ```

    **Arguments:**

    - `model`, `state`: as `eqx.nn.make_with_state` made them, or as training has left them; an
        ensemble, too. Both stay as they are, and valid.
    - `where`: called with the path of each layer of this package, as `layers[1].norm`, and the
        layer; those for which it is true are changed. All of them unless given. Several
        layers that share one state (`eqx.nn.State(model)`) change their approach together.
    - `settings`: `approach`, `momentum`, `eps`, `unbiased`, `activation`, `implementation` and
        `axis_name`, as `BatchNorm` takes them. A `LayerNorm` has `eps`, `activation` and
        `implementation`, and is left as it is by the others. An approach given by name keeps
        the momentum that the layer has.

    **Returns:** a new model and a new state, of the tree structure of those that are made with
    these settings. What is remembered is carried over: inference is as before, and what has
    not seen a batch is as new. Between the approaches that are known by name the memory stays
    as it is to the bit, but that in `"ema"` its weight is 1; for any other it is made by
    `load`. The running variance stays what it was under `unbiased=` until batches change it.

    **Raises:** `ValueError` where no layer is chosen, for a setting that none of those chosen
    has, for a value that makes no sense, for a strategy without `load`, for a subclass with an
    `__init__` or fields of its own, and for a state that is not the model's.
    """
    check(settings)
    norms = found(model, (BatchNorm, LayerNorm))
    chosen = {path for path, layer in norms.items() if where is None or where(path, layer)}
    if not chosen:
        raise ValueError(
            "No layer was chosen. "
            + (
                f"`where` is false for all that there are: {', '.join(map(repr, norms))}."
                if norms
                else "The model has none of this package; eqx_norm.swap(model, state) turns "
                "those of eqx.nn into some."
            )
        )
    if not any(isinstance(norms[path], BatchNorm) for path in chosen):
        for name in settings:
            if name not in _OF_ROWS:
                raise ValueError(
                    f"{name}= is a setting of BatchNorm, but only LayerNorms were chosen: "
                    f"{', '.join(map(repr, sorted(chosen)))}. Leave it out, or choose others."
                )
    return reset(model, state, lambda path, layer: settings if path in chosen else {})


def check(settings: Mapping[str, Any]) -> None:
    """Raises `ValueError` for what is not a setting that a layer can change."""
    for name in settings:
        if name not in _OF_BATCHES:
            raise ValueError(
                f"{name}= cannot be changed in a layer that exists. What can is "
                f"{', '.join(sorted(_OF_BATCHES))}. Weights are changed by eqx.tree_at, "
                "training and inference by eqx.nn.inference_mode."
            )


def reset(
    model: Model, state: eqx.nn.State, settings: Callable[[str, Any], Mapping[str, Any]]
) -> tuple[Model, eqx.nn.State]:
    """Returns model and state with `settings(path, layer)` for each layer of this package."""
    held = entries(state)
    memories: dict[Any, tuple[str, Any]] = {}  # by marker; the path is that of an error
    left: dict[Any, str] = {}

    def changed(path: str, layer: Layer) -> Layer:
        given = dict(settings(path, layer))
        if isinstance(layer, LayerNorm):
            given = {name: value for name, value in given.items() if name in _OF_ROWS}
            with located(path, layer):
                return _row(layer, given) if given else layer
        marker = layer.memory_index.marker
        keeps = not {"approach", "momentum"} & set(given)
        if keeps:
            left[marker] = path
        if not given:
            return layer
        if isinstance(given.get("approach"), str) and layer.momentum is not None:
            given = {"momentum": layer.momentum} | given
        with located(path, layer):
            _check_own(layer, BatchNorm)
            new = rebuilt(layer, type(layer), **given)
            if marker not in held:
                raise ValueError(
                    "the state given holds nothing of this layer: it was made for another "
                    "model. Give the one that was made, or returned, with this model."
                )
            if not keeps and marker not in memories:
                memory = carried(layer.approach, new.approach, layer.input_size, held[marker])
                memories[marker] = path, memory
        return new

    new = each(model, (BatchNorm, LayerNorm), changed)
    for marker, (path, _) in memories.items():
        if marker in left:
            raise ValueError(
                f"{path} and {left[marker]} share one state, and only the first is to change "
                "its approach: they could not read the same memory. Choose both, or neither."
            )
    return new, state_of(new, held | {m: memory for m, (_, memory) in memories.items()})


@contextlib.contextmanager
def located(path: str, layer: Any) -> Iterator[None]:
    """Puts the path of a layer in front of what is said about it."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path or type(layer).__name__}: {error}") from error


def _row(layer: LayerNorm, changed: Mapping[str, Any]) -> LayerNorm:
    _check_own(layer, LayerNorm)
    names = ("shape", "eps", "use_weight", "use_bias", "activation", "implementation")
    new = type(layer)(**{name: getattr(layer, name) for name in names} | dict(changed))
    return eqx.tree_at(
        lambda norm: [norm.weight, norm.bias],
        new,
        [layer.weight, layer.bias],
        is_leaf=lambda node: node is None,
    )


def _check_own(layer: Layer, base: type[Layer]) -> None:
    """Raises unless the layer can be made as those of its `base` are."""
    own = {field.name for field in dataclasses.fields(layer)}
    own -= {field.name for field in dataclasses.fields(base)}
    init = "__init__" if type(layer).__init__ is not base.__init__ else ""
    if own or init:
        raise ValueError(
            f"{type(layer).__qualname__} is a subclass of {base.__name__} with "
            f"{', '.join(filter(None, [init, *sorted(own)]))} of its own: how to make another "
            "one is not known. Make it anew, or leave it out by `where`."
        )
