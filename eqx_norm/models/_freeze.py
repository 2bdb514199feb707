"""Defines `freeze`, `unfreeze` and `trainable`, for batch norms that are not to be trained."""

from typing import Any, TypeGuard

import equinox as eqx
import jax
from jaxtyping import PyTree

from eqx_norm._batch_norm import BatchNorm
from eqx_norm.strategies import AbstractStrategy, Frozen

from ._layers import Model, Where, chosen, copied, with_nodes


def freeze(model: Model, where: Where | None = None, *, weights: bool = True) -> Model:
    """Returns the model with batch norms frozen: they normalise by their running statistics.

    A frozen layer never updates its running statistics, and the gradients of its weight, bias
    and `activation` are 0, whatever `eqx.nn.inference_mode` or a call's `inference=` says. With
    `weights=False` only the statistics are fixed, as by PyTorch's `norm.eval()`. The approach
    becomes `strategies.Frozen(approach, weights)`. The state and the model's leaves do not
    change, so the frozen and the original model can read each other's checkpoints.

    ```python
    model = freeze(model, lambda path, layer: path.startswith("layers[1]"))
    optimiser = optax.adamw(1e-3, mask=trainable)
    ```

    **Optimisers may change arrays whose gradient is 0**, by weight decay or by momentum from
    earlier steps. `trainable` tells them which arrays to leave alone. If you continue with an
    optimiser state, freeze it in the same way: `opt_state = freeze(opt_state)`.

    **Arguments:**

    - `model`: any pytree of layers, or an optimiser state for it.
    - `where`: a function of a layer's path, such as `layers[1].norm`, and the layer, which
        returns whether to freeze it. By default all batch norms are frozen.
    - `weights`: whether to freeze weight, bias and `activation`, too; also for layers that are
        frozen already.

    **Raises:** `ValueError` if there is no such layer.
    """
    layers = chosen(model, BatchNorm, where, "freeze", "eqx_norm.BatchNorm")
    frozen = dict[str, BatchNorm]()
    for path, layer in layers.items():
        approach = without_frozen(layer.approach)
        if approach.learns:
            frozen[path] = copied(layer, approach=Frozen(approach, weights))
    return with_nodes(model, frozen)


def unfreeze(model: Model, where: Where | None = None) -> Model:
    """Returns the model with frozen batch norms that train again, from their statistics.

    The last `eqx.nn.inference_mode` decides whether a norm is in training or inference mode.

    **Arguments:** `model` and `where` as for `freeze`; by default all frozen layers.

    **Raises:** `ValueError` if there is no such layer.
    """
    layers = chosen(model, BatchNorm, where, "unfreeze", "frozen BatchNorm", is_frozen)
    learning = {p: copied(n, approach=n.approach.strategy) for p, n in layers.items()}
    return with_nodes(model, learning)


def trainable(model: Any) -> Any:
    """Returns whether each leaf of a pytree is trained.

    `eqx.partition(model, trainable(model))` separates trained leaves from the rest.
    `optax.adamw(1e-3, mask=trainable)` and `optax.masked(optimiser, trainable)` leave frozen
    layers alone. (Pass the function itself: Optax would call a model of bools.)

    **Returns:** a pytree of bools: `True` for float and complex arrays except frozen ones.
    """

    def is_fixed(node: PyTree) -> bool:
        if is_frozen(node):
            return not node.approach.trains_weights
        return isinstance(node, Frozen)

    def trained(node: PyTree) -> PyTree:
        if is_fixed(node):
            return jax.tree.map(lambda _: False, node)
        return eqx.is_inexact_array(node)

    return jax.tree.map(trained, model, is_leaf=is_fixed)


def is_frozen(node: PyTree) -> TypeGuard[BatchNorm]:
    """Returns whether a node of a model is a frozen batch norm."""
    return isinstance(node, BatchNorm) and isinstance(node.approach, Frozen)


def without_frozen(approach: AbstractStrategy[Any]) -> AbstractStrategy[Any]:
    """Returns the strategy inside of a `Frozen`, and any other strategy unchanged."""
    return approach.strategy if isinstance(approach, Frozen) else approach
