"""Defines `decay_mask`, which excludes norms and biases from weight decay."""

from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from eqx_norm._example import AbstractExampleNorm

from ._freeze import trainable
from ._layers import LINEAR, NORMS

_NORMS = (*NORMS, AbstractExampleNorm)
_WITH_BIAS = (*LINEAR, eqx.nn.GRUCell, eqx.nn.LSTMCell)


def decay_mask(model: Any) -> Any:
    """Returns whether weight decay applies to each leaf of a pytree.

    Norms and biases are excluded by the layer that they are in, not by their number of axes, so
    the mask is also right for blocks that are stacked for `jax.lax.scan`.

    ```python
    optimiser = optax.adamw(1e-3, mask=decay_mask)
    decay = optax.add_decayed_weights(1e-4, mask=decay_mask)
    ```

    **Arguments:** `model`: a model, or a pytree of its form, such as the gradients. (Pass the
    function itself: Optax would call a model of bools.)

    **Returns:** a pytree of bools of the same structure: `True` for float and complex arrays,
    except

    - weight and bias of norms: this package's, those of `eqx.nn`, and subclasses;
    - the bias of `eqx.nn.Linear`, `Conv`, `ConvTranspose`, `GRUCell` and `LSTMCell`, of
        subclasses, and of layers that contain these, such as `MultiheadAttention`;
    - frozen arrays, as in `trainable`.

    So an `Embedding`, a `PReLU`, and a `bias` in modules of your own decay. To exclude more,
    write a function: `lambda tree: eqx.tree_at(lambda tree: tree.embedding.weight,
    decay_mask(tree), False)`.
    """
    return _without_norms_and_biases(trainable(model))


def _without_norms_and_biases(mask: PyTree) -> PyTree:
    """Returns the mask with `False` for weight and bias of norms, and for biases."""

    def is_layer(node: PyTree) -> bool:
        return isinstance(node, _NORMS + _WITH_BIAS)

    def changed(node: PyTree) -> PyTree:
        return _layer_mask(node) if is_layer(node) else node

    return jax.tree.map(changed, mask, is_leaf=is_layer)


def _layer_mask(mask: eqx.Module) -> eqx.Module:
    excluded = ("weight", "bias") if isinstance(mask, _NORMS) else ("bias", "bias_n")
    fields, structure = jtu.tree_flatten_with_path(mask, lambda child: child is not mask)
    masks = list[PyTree]()
    for (key,), field in fields:
        if key.name in excluded:
            masks.append(jax.tree.map(lambda _: False, field))
        else:
            masks.append(_without_norms_and_biases(field))
    return structure.unflatten(masks)
