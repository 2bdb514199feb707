"""Defines `reconfigure`: layers that exist get other settings, and a memory that fits."""

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
from eqx_norm.strategies import (
    AbstractWrapper,
    Accumulation,
    Running,
)

from ._layers import OverMembers, Remembered, Where, chosen, copied, replaced

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
    """Returns the model with other settings of its layers, and a state that fits them.

    (`eqx.tree_at` on a layer's `approach` leaves its `momentum` and its memory those of the old
    one; `dataclasses.replace` does not work on a layer.)

    ```python
    model, state = reconfigure(model, state, approach="smooth_start", momentum=0.9)
    first = lambda path, layer: path == "layers[1]"
    model, state = reconfigure(model, state, first, activation=jax.nn.relu)
    ```

    **Arguments:**

    - `model`, `state`: as `eqx.nn.make_with_state` made them, or as training has left them; an
        ensemble, too. Both stay as they are, and valid.
    - `where`: called with the path of each layer of this package, as `layers[1].norm`, and the
        layer; those for which it is true are changed. All of them unless given. Layers that
        share one state (`eqx.nn.State(model)`) are to change their approach together.
    - `settings`: `approach`, `momentum`, `eps`, `unbiased`, `activation`, `implementation`,
        `axis_name` and `memory_axis_name`, as `BatchNorm` takes them. The other layers have
        `eps`, `activation` and, but for `RMSNorm`, `implementation`; they are left as they are
        by the rest. An approach given by name keeps the momentum that the layer has. It may
        also be a function of the layer's strategy:
        `approach=lambda strategy: Accumulated(strategy, every=4)`.

    **Returns:** a new model and a new state, of the tree structure of those that are made with
    these settings. What is remembered is carried over: inference is as before, and what has
    not seen a batch is as new. Between the approaches that are known by name the memory stays
    as it is to the bit; for a strategy that remembers something else it is made by `load`. The
    running variance stays what it was under `unbiased=` until batches change it.

    **Raises:** `ValueError` where no layer is chosen, for a setting that none of those chosen
    has, for a value that makes no sense, for a strategy without `load`, and for a state that is
    not the model's.
    """
    what = "layer of eqx_norm; eqx_norm.models.swap(model, state) makes some of eqx.nn's"
    layers = chosen(model, _OURS, where, "reconfigure", what)
    check(settings, layers)
    make = dict.fromkeys(layers, lambda layer: _changed(layer, settings))
    return replaced(model, state, _OURS, make, carry)


def check(settings: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
    """Raises `ValueError` for what is not a setting that one of the layers can change."""
    has_batches = any(isinstance(layer, eqx.nn.BatchNorm) for layer in layers.values())
    for name in settings:
        if name not in _OF_BATCHES:
            raise ValueError(
                f"{name}= cannot be changed in a layer that exists. What can is "
                f"{', '.join(sorted(_OF_BATCHES))}. Weights are changed by eqx.tree_at, "
                "training and inference by eqx.nn.inference_mode."
            )
        if name not in _OF_EXAMPLES and not has_batches:
            raise ValueError(
                f"{name}= is a setting of BatchNorm, but none was chosen. Leave it "
                "out, or choose others."
            )


def _changed(layer: Any, settings: Mapping[str, Any]) -> Any:
    """Returns the layer with other settings, which are checked as those of a new one are."""
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


def carry(old: Any, new: Any, remembered: Remembered, over: OverMembers) -> Remembered:
    """Returns what the new layer remembers: it infers as the old one does.

    A `Running` means the same to all strategies that remember one, and is handed on as it is.
    Others are loaded. What has seen no batch has seen none afterwards. Micro-batches that are
    pending are not handed on, and those that were no update are not counted any more.
    """
    memory, accepted = remembered["memory_index"], batches_of(remembered)
    fresh = over(lambda memory: is_new(old, memory))(memory)
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
        if never:  # then a strategy without `load` serves, too
            return start
        used = old.approach.infer(memory)
        # Where the count is the true one, an unbiased variance is made by it.
        loaded = new.approach.load(dataclasses.replace(used, ddof=int(new.unbiased)))
        return jax.tree.map(lambda a, b: jnp.where(fresh, a, b), start, loaded)

    return remembered | {"memory_index": over(one)(memory, fresh), "accepted_index": accepted}


def batches_of(remembered: Remembered) -> Array:
    """Returns how many batches a strategy has taken in: not micro-batches, of which there are
    several to a batch."""
    memory, accepted = remembered["memory_index"], remembered["accepted_index"]
    return accepted - memory.skipped if isinstance(memory, Accumulation) else accepted


def is_new(layer: BatchNorm, memory: Any) -> Bool[Array, ""]:
    """Returns whether a memory, which has to be the layer's, has taken in no batch."""
    _memory.check(memory, layer.approach, layer.input_size)
    empty = _core(layer.approach.init(layer.input_size, dtype_of(memory)))
    memory = _core(memory)
    same = jax.tree.map(lambda a, b: jnp.all(a == b), memory, empty)
    return jnp.all(jnp.asarray(jax.tree.leaves(same)))


def _innermost(approach: Any) -> Any:
    """Returns the strategy inside of those that wrap one."""
    while isinstance(approach, AbstractWrapper):
        approach = approach.strategy
    return approach


def _core(memory: Any) -> Any:
    """Returns the memory without micro-batches that are pending."""
    return memory.remembered if isinstance(memory, Accumulation) else memory


def dtype_of(memory: Any) -> jnp.dtype:
    """Returns the dtype of the mean in a strategy's memory."""
    is_complex = any(map(jnp.iscomplexobj, jax.tree.leaves(memory)))
    return _memory.statistics_dtype(complex if is_complex else float)
