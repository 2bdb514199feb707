"""Defines `unswap`: the layers of this package in a model become Equinox's again."""

import math
from typing import Any, TypeVar, cast

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from eqx_norm._batch_norm import BatchNorm
from eqx_norm._layer_norm import LayerNorm
from eqx_norm.strategies import Accumulated, Batch, Ema

from ._carried import each_member, form, is_new
from ._indices import Renamed, index
from ._layers import each, entries, state_of
from ._reconfigure import located

Model = TypeVar("Model")

_FIELDS: dict[str, tuple[str, str]] = {
    "ema": ("ema_first_time_index", "ema_state_index"),
    "batch": ("batch_counter", "batch_state_index"),
}


def unswap(
    model: Model,
    state: eqx.nn.State,
    mode: str | None = None,
    *,
    subclasses: bool = False,
) -> tuple[Model, eqx.nn.State]:
    r"""Returns the model with Equinox's layers in place of this package's, and its state.

    ```python
    model, state = unswap(model, state)
    eqx.tree_serialise_leaves(path, (model, state))     # for a program without this package
    ```

    **Statistics** are put so that Equinox's inference normalises by the same mean and variance.
    For `mode="batch"`, which divides them by $1 - m^t$, its count $t$ of batches is set to one
    at which that is 1, if it is not that large already: its own start is wrong
    (`eqx_norm.swap`), and would be wrong again. The statistics are of float32 at least.

    **Arguments:**

    - `model`, `state`: a model with layers of this package; an ensemble, too. Both stay as
        they are, and valid.
    - `mode`: of all layers. Unless given it is what each layer's approach is called there:
        `"batch"` or `"ema"`. The momentum is the approach's, 0.99 where it has none.
    - `subclasses`: turns layers of a subclass of this package's, too; what fields and methods
        they have of their own is lost.

    **Returns:** a new model and a new state, of the tree structure of those that are made with
    Equinox's layers. What has seen no batch is as new. `unbiased`, `implementation` and the
    counts of batches have no place there, and are lost; what Equinox's layer gets wrong
    (README.md) is wrong again.

    **Raises:** `ValueError` for an approach that Equinox does not have, unless there is a
    `mode`; for an `activation`, which it does not have either; for a subclass, unless
    `subclasses`; and for a state that is not the model's.
    """
    if mode is not None and mode not in _FIELDS:
        raise ValueError(f"mode={mode!r}: eqx.nn.BatchNorm has mode='batch' and mode='ema'.")
    held = entries(state)
    names = {name: Renamed(fields) for name, fields in _FIELDS.items()}
    old: set[Any] = set()
    new: dict[Any, Any] = {}

    def theirs(path: str, layer: Any) -> Any:
        with located(path, layer):
            _check(layer, subclasses)
            if isinstance(layer, LayerNorm):
                return _row(layer)
            kind = _mode(layer) if mode is None else mode
            indices = layer.memory_index, layer.accepted_index, layer.rejected_index
            if missing := [i.marker for i in indices if i.marker not in held]:
                raise ValueError(
                    f"the state given holds nothing at {missing[0]!r}: it was made for another "
                    "model. Give the one that was made, or returned, with this model."
                )
            markers = names[kind](indices[0].marker, "memory_index")
            values = _values(layer, kind, *(held[i.marker] for i in indices[:2]))
            old.update(i.marker for i in indices)
            new.update(zip(markers.values(), values, strict=True))
            return _layer(layer, kind, markers)

    model = each(model, (BatchNorm, LayerNorm), theirs)
    held = {marker: value for marker, value in held.items() if marker not in old}
    return model, state_of(model, held | new)


def _check(layer: Any, subclasses: bool) -> None:
    kind = type(layer)
    if kind not in (BatchNorm, LayerNorm) and not subclasses:
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} is a subclass, and what it does "
            "differently would be lost. To turn it all the same, give subclasses=True."
        )
    if layer.activation is not None:
        raise ValueError(
            f"activation={layer.activation} has no place in Equinox's layer. Take it out, "
            "model, state = eqx_norm.reconfigure(model, state, activation=None), and apply it "
            "to what the layer returns."
        )


def _mode(layer: BatchNorm) -> str:
    approach: Any = layer.approach
    approach = approach.strategy if type(approach) is Accumulated else approach
    if type(approach) in (Batch, Ema):
        return "ema" if type(approach) is Ema else "batch"
    raise ValueError(
        f"approach={layer.approach} is not in eqx.nn.BatchNorm. Say as what it is to train "
        "there, unswap(..., mode='batch') or mode='ema'; inference is the same."
    )


def _momentum(layer: BatchNorm) -> float:
    return 0.99 if layer.momentum is None else layer.momentum


def _layer(layer: BatchNorm, mode: str, markers: dict[str, Any]) -> eqx.nn.BatchNorm:
    new = eqx.nn.BatchNorm(
        layer.input_size,
        layer.axis_name,
        layer.eps,
        layer.channelwise_affine,
        _momentum(layer),
        mode=cast(Any, mode),
    )
    arrays = ("weight", "bias", "inference")
    return eqx.tree_at(
        lambda norm: [getattr(norm, name) for name in (*arrays, *markers)],
        new,
        [getattr(layer, name) for name in arrays] + [index(m) for m in markers.values()],
        is_leaf=lambda node: node is None or isinstance(node, eqx.nn.StateIndex),
    )


def _row(layer: LayerNorm) -> eqx.nn.LayerNorm:
    return eqx.tree_at(
        lambda norm: [norm.weight, norm.bias],
        eqx.nn.LayerNorm(layer.shape, layer.eps, layer.use_weight, layer.use_bias),
        [layer.weight, layer.bias],
        is_leaf=lambda node: node is None,
    )


def _values(layer: BatchNorm, mode: str, memory: Any, accepted: Array) -> tuple[Any, Any]:
    """Returns the two entries of Equinox's state: the count, or whether it is new, and the
    statistics."""
    empty, axes = form(layer.approach, layer.input_size, memory)

    def one(memory: Any, accepted: Array) -> tuple[Any, Any]:
        new = is_new(memory, empty)
        used = layer.approach.infer(memory)
        mean, variance = used.mean + used.mean_rest, used.variance
        if mode == "ema":
            variance = jnp.where(new, 0, variance)
            return new, (mean, variance.astype(mean.dtype))
        # From here on 1 - m^t is 1 in the dtype of the statistics.
        bits = jnp.finfo(variance.dtype).nmant + 3
        steps = min(math.ceil(-bits * math.log(2) / math.log(_momentum(layer))), 2**31 - 1)
        count = jnp.where(new, 0, jnp.maximum(accepted, steps)).astype(jnp.result_type(int))
        return count, (mean, variance.astype(mean.dtype))

    return each_member(one, axes)(memory, accepted)
