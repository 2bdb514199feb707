"""Defines `freeze`, `unfreeze` and `trainable`: layers that normalise but no longer learn."""

from typing import Any, TypeVar

import equinox as eqx
import jax

from eqx_norm._batch_norm import BatchNorm
from eqx_norm.strategies import Frozen

from ._layers import Where, chosen, copied, each

Model = TypeVar("Model")


def freeze(model: Model, where: Where | None = None) -> Model:
    """Returns the model with batch norms that normalise by what they remember, for ever.

    A frozen layer changes neither its memory nor, by gradients, its weight, its bias and the
    arrays of its `activation`; whatever `eqx.nn.inference_mode` or a call's `inference=` says.
    Its approach is `strategies.Frozen`, around its own. The state stays as it is, and so do the
    model's leaves: checkpoints of a model and of the same model frozen can be read into each
    other.

    ```python
    model = freeze(model, lambda path, layer: path.startswith("layers[1]"))
    optimiser = optax.adamw(1e-3, mask=trainable)
    ```

    **Gradients of frozen arrays are 0**, and some optimisers move what has gradient 0, too: by
    weight decay, or by the momentum of the steps before it was frozen. `trainable` tells them
    what to leave alone. What an optimiser remembers is made of models as well: where it is to
    be used further, freeze it, too, `memory = freeze(memory)`.

    **Arguments:** `model`: any pytree of layers, or of their parts. `where`: which batch norms
    are frozen, from a layer's path, as `layers[1].norm`, and the layer; all unless given.

    **Raises:** `ValueError` if there is no such layer.

    The wish for it: https://github.com/pytorch/pytorch/issues/66073.
    """
    layers = chosen(model, BatchNorm, where, "freeze", "eqx_norm.BatchNorm")
    layers = {path: layer for path, layer in layers.items() if layer.approach.learns}

    def frozen(path: str, layer: BatchNorm) -> BatchNorm:
        return copied(layer, approach=Frozen(layer.approach)) if path in layers else layer

    return each(model, BatchNorm, frozen)


def unfreeze(model: Model, where: Where | None = None) -> Model:
    """Returns the model with frozen batch norms that learn again, from what they remember.

    They are in training or in inference mode as `eqx.nn.inference_mode` has said last.

    **Arguments:** `model`: what `freeze` has returned, with its leaves trained further or not.
    `where`: which of the frozen layers; all unless given.

    **Raises:** `ValueError` if there is no such layer.
    """
    layers = chosen(model, BatchNorm, where, "unfreeze", "frozen BatchNorm", is_frozen)

    def learning(path: str, layer: Any) -> Any:
        return copied(layer, approach=layer.approach.strategy) if path in layers else layer

    return each(model, BatchNorm, learning)


def trainable(model: Any) -> Any:
    """Returns, in the model's structure, which leaves are trained: a bool for each.

    True are float and complex arrays, but for those of frozen layers. With it
    `eqx.partition(model, trainable(model))` splits a model into what is differentiated and the
    rest; and `optax.adamw(1e-3, mask=trainable)` or `optax.masked(optimiser, trainable)` leave
    frozen layers alone. (Give Optax the function: it would call a model of bools.)
    """

    def trained(node: Any) -> Any:
        if is_frozen(node):
            return jax.tree.map(lambda _: False, node)
        return eqx.is_inexact_array(node)

    return jax.tree.map(trained, model, is_leaf=is_frozen)


def is_frozen(node: Any) -> bool:
    """Returns whether a node of a model is a frozen batch norm."""
    return isinstance(node, BatchNorm) and isinstance(node.approach, Frozen)
