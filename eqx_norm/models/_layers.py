"""Finds layers in a model and puts others in their place, together with what they remember."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax

from eqx_norm._batch_norm import BatchNorm

Model = TypeVar("Model")
Kind = type[Any] | tuple[type[Any], ...]

# What an existing layer was made with; its weight, bias and indices are arrays of their own.
_SETTINGS = (
    "input_size",
    "axis_name",
    "eps",
    "channelwise_affine",
    "inference",
    "approach",
    "activation",
    "unbiased",
    "implementation",
)
_ARRAYS = ("weight", "bias", "memory_index", "accepted_index", "rejected_index")


def found(model: Any, kind: Kind) -> dict[str, Any]:
    """Returns the layers of a kind by their paths, as `layers[1].norm`, however nested."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda n: isinstance(n, kind))
    return {_name(path): leaf for path, leaf in leaves if isinstance(leaf, kind)}


def each(model: Model, kind: Kind, function: Callable[[str, Any], Any]) -> Model:
    """Returns the model with `function(path, layer)` in place of each layer of a kind."""

    def replaced(path: Any, node: Any) -> Any:
        return function(_name(path), node) if isinstance(node, kind) else node

    return jax.tree_util.tree_map_with_path(
        replaced, model, is_leaf=lambda node: isinstance(node, kind)
    )


def rebuilt(layer: BatchNorm, cls: type[BatchNorm] = BatchNorm, **changed: Any) -> BatchNorm:
    """Returns a layer made as `layer` was, but for what has `changed`.

    Settings are checked as those of a new layer are. Weight, bias and the indices of the state
    are those of `layer`, of whatever shape: an ensemble's have one axis more.
    """
    if "momentum" in changed:
        approach = changed.get("approach", layer.approach)
        if not isinstance(approach, str):
            changed["approach"] = _with_momentum(approach, changed.pop("momentum"))
    settings = {name: getattr(layer, name) for name in _SETTINGS} | changed
    return eqx.tree_at(
        lambda norm: [getattr(norm, name) for name in _ARRAYS],
        cls(**settings),
        [getattr(layer, name) for name in _ARRAYS],
        is_leaf=lambda node: node is None or isinstance(node, eqx.nn.StateIndex),
    )


def copied(layer: Any, cls: type[Any] | None = None, **changed: Any) -> Any:
    """Returns the layer with other values in some fields, static ones too, or of another class
    with the same fields. Nothing is checked, so any part of a layer can be copied: what
    `eqx.partition` makes of it, or what an optimiser remembers of it.
    """
    new = object.__new__(cls or type(layer))
    for field in dataclasses.fields(layer):
        object.__setattr__(new, field.name, changed.get(field.name, getattr(layer, field.name)))
    return new


def entries(state: eqx.nn.State) -> dict[Any, Any]:
    """Returns what a state holds, by the markers of its indices; the state stays valid."""
    values, markers = state.tree_flatten()
    return dict(zip(markers, values, strict=True))


def state_of(model: Any, held: Mapping[Any, Any]) -> eqx.nn.State:
    """Returns a state that holds these entries, in the order of the model's indices, as
    `make_with_state` has them; what the model does not know comes last.

    (A checkpoint is a list of arrays in that order.)
    """
    markers = [index.marker for index in found(model, eqx.nn.StateIndex).values()]
    order = dict.fromkeys([*(m for m in markers if m in held), *held])
    return eqx.nn.State.tree_unflatten(tuple(order), tuple(held[m] for m in order))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path).removeprefix(".")


def _with_momentum(approach: Any, momentum: float) -> Any:
    """Returns the strategy with another momentum, which one that it wraps may have."""
    fields = {field.name for field in dataclasses.fields(approach)}
    if "momentum" in fields:
        return dataclasses.replace(approach, momentum=momentum)
    if "strategy" in fields:
        inner = _with_momentum(approach.strategy, momentum)
        return dataclasses.replace(approach, strategy=inner)
    raise ValueError(
        f"momentum={momentum!r}: the approach {approach} has none. Leave it out, or give an "
        "approach that has one."
    )
