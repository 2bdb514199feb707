"""`monitor_module`: every layer of a model is monitored, by its path."""

import functools
from typing import Any, TypeVar, cast

import equinox as eqx
import jax

from ._monitor import monitor

Model = TypeVar("Model")

# What is inside of one of these is a part of it: an activation, or a strategy's memory.
_WHOLE = (eqx.nn.BatchNorm, eqx.nn.LayerNorm)

# The field that a monitored layer has in addition, out of the way of a layer's own.
_NAME = "_monitored_as"


def monitor_module(model: Model, name: str = "") -> Model:
    """The model, with what each of its layers returns monitored.

    ```python
    def loss(model, x):
        return jnp.mean(jax.vmap(monitor_module(model))(x) ** 2)
    ```

    gives the rows `encoder.conv1`, `blocks.2.norm`, ... and their cotangents. A layer is any
    `eqx.Module` that can be called, wherever it is in the model: in fields, lists, dicts,
    `eqx.nn.Sequential`. Of a block that is made of layers, these are monitored and then the
    block; so, if it has a name, is the model. A model that is itself the one layer goes by the
    name of its class if it is given none: `Linear`. Of what a layer returns together with an
    `eqx.nn.State`, the state is left out.

    Each layer stays what it was: an instance of (a subclass of) its class, with its fields and
    its leaves. So `isinstance`, attributes, `eqx.tree_at`, `eqx.filter`,
    `eqx.nn.inference_mode` and serialisation work on the result as on the model, and a file
    written from one can be read into the other. It costs nothing to make; used inside the loss
    as above, the model that is trained is not changed.

    Not seen are: layers that are no modules (functions; `jax.nn.relu` in `eqx.nn.Lambda` is
    one), methods other than `__call__`, the inside of a `BatchNorm` or `LayerNorm`, and
    comparisons like `type(layer) is eqx.nn.Linear`, which then fail.

    **Arguments:**

    - `model`: any tree with `eqx.Module`s in it.
    - `name`: what the paths start with, if anything: `monitor_module(encoder, "encoder")`.

    **Returns:** the same tree of the same leaves.

    **Raises:** `ValueError` where there is no layer in it: nothing would be recorded.
    """
    monitored = _monitor_layers(model, name)
    if not _has_layers(monitored) and not name:
        monitored = _monitor_layers(model, type(model).__name__)
    if not _has_layers(monitored):
        raise ValueError(
            f"monitor_module(...): there is no layer in this {type(model).__name__}, no "
            "eqx.Module that can be called, so that nothing would be recorded. Give the model "
            "that is called, or use monitor(value, name) on what it computes."
        )
    return monitored


def _monitor_layers(model: Model, name: str) -> Model:
    def is_inner(node: Any) -> bool:
        return isinstance(node, eqx.Module) and node is not model

    def inner(path: jax.tree_util.KeyPath, node: Any) -> Any:
        if not is_inner(node):
            return node
        inside = jax.tree_util.keystr(path, simple=True, separator=".")
        return _monitor_layers(node, f"{name}.{inside}" if name else inside)

    if not isinstance(model, _WHOLE):
        model = jax.tree_util.tree_map_with_path(inner, model, is_leaf=is_inner)
    is_layer = name and isinstance(model, eqx.Module) and callable(model)
    if not is_layer or _is_monitored(model):
        return model
    layer: Any = object.__new__(_monitored(type(model)))
    for field, value in vars(model).items():
        object.__setattr__(layer, field, value)
    object.__setattr__(layer, _NAME, name)
    return layer


def _is_monitored(node: Any) -> bool:
    return hasattr(node, _NAME)


def _has_layers(tree: Any) -> bool:
    return any(map(_is_monitored, jax.tree.leaves(tree, is_leaf=_is_monitored)))


# One class for each, so that the trees of two models that are alike are alike.
@functools.cache
def _monitored(layer: type[eqx.Module]) -> type[eqx.Module]:
    original, meta = cast(Any, layer).__call__, cast(Any, type(layer))

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _without_state(original(self, *args, **kwargs), getattr(self, _NAME))

    fields = {
        "__module__": layer.__module__,
        "__qualname__": f"Monitored{layer.__qualname__}",
        "__doc__": layer.__doc__,
        "__annotations__": {_NAME: str},
        _NAME: eqx.field(static=True, default=""),
        "__call__": call,
    }
    return meta(f"Monitored{layer.__name__}", (layer,), fields)


def _without_state(output: Any, name: str) -> Any:
    def is_state(node: Any) -> bool:
        return isinstance(node, eqx.nn.State)

    if type(output) is tuple and sum(map(is_state, output)) == len(output) - 1 > 0:
        # An output and its state, as a `StatefulLayer` returns them: no `.0` in the name.
        return tuple(part if is_state(part) else monitor(part, name) for part in output)
    states, rest = eqx.partition(output, is_state, is_leaf=is_state)
    return eqx.combine(states, monitor(rest, name), is_leaf=is_state)
