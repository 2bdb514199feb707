"""Defines `decay_mask`, which excludes norms and biases from weight decay."""

from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from eqx_norm._example import AbstractExampleNorm

from ._freeze import trainable

_NORMS = eqx.nn.BatchNorm, eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm
_NORMS += (AbstractExampleNorm,)
_WITH_BIAS = eqx.nn.Linear, eqx.nn.Conv, eqx.nn.ConvTranspose, eqx.nn.GRUCell, eqx.nn.LSTMCell


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
    return _with_exceptions(trainable(model))


def _with_exceptions(mask: Any) -> Any:
    """Returns the mask with `False` for weight and bias of norms, and for biases."""
    return jax.tree.map(_of_node, mask, is_leaf=_is_layer)


def _is_layer(node: Any) -> bool:
    return isinstance(node, _NORMS + _WITH_BIAS)


def _of_node(node: Any) -> Any:
    if not _is_layer(node):
        return node
    names = ("weight", "bias") if isinstance(node, _NORMS) else ("bias", "bias_n")
    fields, structure = jtu.tree_flatten_with_path(node, lambda child: child is not node)
    masks = list[Any]()
    for (key,), field in fields:
        is_exception = key.name in names
        masks.append(
            jax.tree.map(lambda _: False, field) if is_exception else _with_exceptions(field)
        )
    return structure.unflatten(masks)
