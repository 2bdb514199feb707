"""Defines `reconfigure`, which changes settings of existing layers and keeps statistics."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from eqx_norm import _memory
from eqx_norm._batch_norm import BatchNorm
from eqx_norm._example import AbstractExampleNorm
from eqx_norm._layer_norm import LayerNorm
from eqx_norm._memory import Remembered
from eqx_norm.strategies import AbstractWrapper, Accumulation, Running

from ._layers import Entries, OverMembers, Where, chosen, copied, replaced

Model = TypeVar("Model")

_OURS = BatchNorm, AbstractExampleNorm
_OF_EXAMPLES = AbstractExampleNorm.settings
_OF_BATCHES = (
    *_OF_EXAMPLES,
    "approach",
    "momentum",
    "unbiased",
    "axis_name",
    "memory_axis_name",
)


def reconfigure(
    model: Model, state: eqx.nn.State, where: Where | None = None, **settings: Any
) -> tuple[Model, eqx.nn.State]:
    """Returns the model with other settings in its layers, and a state that fits them.

    (`eqx.tree_at` on a layer's `approach` would not change its `momentum` and its state;
    `dataclasses.replace` does not work on a layer.)

    ```python
    model, state = reconfigure(model, state, approach="smooth_start", momentum=0.9)
    first = lambda path, layer: path == "layers[1]"
    model, state = reconfigure(model, state, first, activation=jax.nn.relu)
    ```

    **Arguments:**

    - `model`, `state`: from `eqx.nn.make_with_state` or training, also of an ensemble. Both
        stay valid.
    - `where`: a function of a layer's path, such as `layers[1].norm`, and the layer, which
        returns whether to change it. By default all layers of this package are changed. Layers
        that share one state (`eqx.nn.State(model)`) must change their approach together.
    - `settings`: `approach`, `momentum`, `eps`, `unbiased`, `activation`, `implementation`,
        `axis_name` and `memory_axis_name`, as `BatchNorm` takes them. The other layers have
        `eps`, `activation` and `implementation`, and ignore the rest. An approach given by name
        keeps the layer's momentum. `approach` may also be a function of the layer's strategy:
        `approach=lambda strategy: Accumulated(strategy, every=4)`.

    **Returns:** a new model and a new state, with the tree structure of a model made with these
    settings. The running statistics are carried over, so inference is as before; a layer that
    has seen no batch is as new. Between named approaches the memory (the strategy's running
    statistics) stays the same to the bit; other strategies convert it by `load`. A new
    `unbiased=` applies to later batches only.

    **Raises:** `ValueError` if no layer is chosen, for a setting that no chosen layer has, for
    an invalid value, for a strategy without `load`, and for a state of another model.
    """
    what = "layer of eqx_norm; eqx_norm.models.swap(model, state) makes some of eqx.nn's"
    layers = chosen(model, _OURS, where, "reconfigure", what)
    check(settings, layers)
    make = dict.fromkeys(layers, lambda layer: _changed(layer, settings))
    return replaced(model, state, _OURS, make, carry)


def check(settings: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a setting that none of the layers can change."""
    has_batches = any(isinstance(layer, eqx.nn.BatchNorm) for layer in layers.values())
    for name in settings:
        if name not in _OF_BATCHES:
            raise ValueError(
                f"{name}= cannot be changed in an existing layer. The settings that can are "
                f"{', '.join(sorted(_OF_BATCHES))}. Use eqx.tree_at for weights, and "
                "eqx.nn.inference_mode for training and inference mode."
            )
        if name not in _OF_EXAMPLES and not has_batches:
            raise ValueError(
                f"{name}= is a setting of BatchNorm, but no BatchNorm was chosen. Leave it "
                "out, or choose one by where=."
            )


def _changed(layer: Any, settings: Mapping[str, Any]) -> Any:
    """Returns the layer with other settings, checked as for a new layer."""
    if isinstance(layer, AbstractExampleNorm):
        given = {name: value for name, value in settings.items() if name in layer.settings}
        fresh: Any = LayerNorm(1, **given)
        return copied(layer, **{name: getattr(fresh, name) for name in given})
    given: dict[str, Any] = {
        "axis_name": layer.axis_name,
        "memory_axis_name": layer.memory_axis_name,
        "approach": layer.approach,
        **settings,
    }
    approach = given["approach"]
    if callable(approach) and not isinstance(approach, type):
        approach = approach(layer.approach)
    if isinstance(approach, str):
        given = ({} if layer.momentum is None else {"momentum": layer.momentum}) | given
    elif "momentum" in given:
        approach = _with_momentum(approach, given.pop("momentum"))
    given["approach"] = approach
    fresh = BatchNorm(layer.input_size, **given)
    return copied(layer, **{name: getattr(fresh, name) for name in (*given, "momentum")})


def _with_momentum(approach: Any, momentum: float) -> Any:
    """Returns the strategy, or the one that it wraps, with another momentum."""
    fields = {field.name for field in dataclasses.fields(approach)}
    if "momentum" in fields:
        return dataclasses.replace(approach, momentum=momentum)
    if "strategy" in fields:
        inner = _with_momentum(approach.strategy, momentum)
        return dataclasses.replace(approach, strategy=inner)
    raise ValueError(
        f"momentum={momentum!r}: the approach {approach} has no momentum. Leave momentum= out, "
        "or pass an approach that has one."
    )


def carry(old: Any, new: Any, remembered: Entries, over: OverMembers) -> Entries:
    """Returns the new layer's entries, with which it infers as the old one does.

    Strategies whose memory is a `Running` share it unchanged; others `load` it. A memory
    without batches becomes a new one. Pending micro-batches are dropped, and accepted
    micro-batches that were no update are not counted.
    """
    memory = remembered["memory_index"]
    fresh = over(lambda memory: is_new(old, memory))(memory.statistics)
    if old.approach == new.approach:
        return remembered
    is_same = type(_innermost(old.approach)) is type(_innermost(new.approach))
    try:
        never = bool(fresh.all())
    except jax.errors.ConcretizationTypeError:
        never = False

    def one(memory: Any, fresh: Bool[Array, ""]) -> Any:
        start = new.approach.init(new.input_size, dtype_of(memory))
        core, inner = _core(memory), _core(start)
        alike = jax.tree.structure(core) == jax.tree.structure(inner)
        if alike and (isinstance(core, Running) or is_same):
            return dataclasses.replace(start, remembered=core) if inner is not start else core
        if never:  # no `load` is needed
            return start
        used = old.approach.infer(memory)
        # A strategy that keeps counts makes the unbiased variance from its count.
        loaded = new.approach.load(dataclasses.replace(used, ddof=int(new.unbiased)))
        return jax.tree.map(lambda a, b: jnp.where(fresh, a, b), start, loaded)

    statistics = over(one)(memory.statistics, fresh)
    return {"memory_index": with_statistics(memory, statistics)}


def with_statistics(memory: Remembered, statistics: Any) -> Remembered:
    """Returns the memory with those of another strategy; it counts no micro-batches."""
    return Remembered(statistics, jnp.stack([batches_of(memory), memory.rejected], -1))


def batches_of(memory: Remembered) -> Array:
    """Returns how many batches, not micro-batches, a strategy has accepted."""
    held = memory.statistics
    return memory.accepted - (held.skipped if isinstance(held, Accumulation) else 0)


def is_new(layer: BatchNorm, memory: Any) -> Bool[Array, ""]:
    """Returns whether a layer's memory has accepted no batch; raises for another layer's."""
    _memory.check(memory, layer.approach, layer.input_size)
    empty = _core(layer.approach.init(layer.input_size, dtype_of(memory)))
    memory = _core(memory)
    same = jax.tree.map(lambda a, b: jnp.all(a == b), memory, empty)
    return jnp.all(jnp.asarray(jax.tree.leaves(same)))


def _innermost(approach: Any) -> Any:
    """Returns the strategy inside of all wrappers."""
    while isinstance(approach, AbstractWrapper):
        approach = approach.strategy
    return approach


def _core(memory: Any) -> Any:
    """Returns the memory without pending micro-batches."""
    return memory.remembered if isinstance(memory, Accumulation) else memory


def dtype_of(memory: Any) -> jnp.dtype:
    """Returns the dtype of the mean in a strategy's memory."""
    is_complex = any(map(jnp.iscomplexobj, jax.tree.leaves(memory)))
    return _memory.statistics_dtype(complex if is_complex else float)
