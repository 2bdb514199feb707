"""Defines `freeze`, `unfreeze` and `trainable`: layers that normalise but no longer learn."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, PRNGKeyArray

from eqx_norm._batch_norm import BatchNorm

from ._layers import Kind, copied, each, found

Model = TypeVar("Model")


class FrozenBatchNorm(BatchNorm):
    r"""Normalises by what it remembers, in training as in inference, and does not learn.

    $$y = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \cdot \gamma + \beta$$

    where mean $\mu$ and variance $\sigma^2$ are those of inference, and $\mu$, $\sigma^2$,
    $\gamma$ and $\beta$ are constants: of all gradients only that of $x$ is not 0. Neither
    `eqx.nn.inference_mode` nor a call's `inference=` changes that. It needs no
    enclosing `vmap`.

    It is what `freeze` puts in place of a `BatchNorm`, with the same fields and leaves.
    """

    def __call__(
        self,
        x: Array | np.ndarray,
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | Bool[Array, ""] | None = None,
        mask: Bool[ArrayLike, "..."] | None = None,
    ) -> tuple[Array, eqx.nn.State]:
        """**Arguments:** those of `BatchNorm`; `inference` is ignored, and so is `key`.

        **Returns:** the normalised `x`, and the state as it was given.

        **Raises:** what `BatchNorm` raises in inference.
        """
        del key, inference
        y, _ = BatchNorm.__call__(
            jax.tree.map(_constant, self), x, state, inference=True, mask=mask
        )
        return y, state


def freeze(model: Model, where: Callable[[str, BatchNorm], bool] | None = None) -> Model:
    """Returns the model with batch norms that normalise by what they remember, for ever.

    A frozen layer changes neither its memory nor, by gradients, its weight, its bias and the
    arrays of its `activation`; whatever `eqx.nn.inference_mode` or a call's `inference=` says.
    The state stays as it is, and so do the model's leaves: checkpoints of a model and of the
    same model frozen can be read into each other.

    ```python
    import equinox as eqx
    import jax
    import optax
    from eqx_norm import BatchNorm
    from eqx_norm.models import freeze, trainable, unfreeze


    def build(key):
        conv = eqx.nn.Conv2d(3, 4, 3, key=key)
        return eqx.nn.Sequential([conv, BatchNorm(4, "batch", approach="batch")])


    model, state = eqx.nn.make_with_state(build)(jax.random.key(0))
    model = freeze(model)
    some = freeze(unfreeze(model), lambda path, layer: path.startswith("layers[1]"))
    optimiser = optax.adamw(1e-3, mask=trainable)
    ```

    **Gradients of frozen arrays are 0**, and some optimisers move what has gradient 0, too: by
    weight decay, or by the momentum of the steps before it was frozen. `trainable` tells them
    what to leave alone. What an optimiser remembers is made of models as well: where it is to
    be used further, freeze it, too, `memory = freeze(memory)`.

    **Arguments:**

    - `model`: any pytree of layers, or of their parts.
    - `where`: which batch norms are frozen, from a layer's path, as `layers[1].norm`, and the
        layer; all unless given.

    **Returns:** the model with a `FrozenBatchNorm` in place of each of these.

    **Raises:** `ValueError` if there is none of them, and for a subclass of a user's own, whose
    methods a frozen layer would lose.

    The wish for it: https://github.com/pytorch/pytorch/issues/66073.
    """
    chosen = _chosen(model, BatchNorm, where, "freeze")
    for path, layer in chosen.items():
        if type(layer) not in (BatchNorm, FrozenBatchNorm):
            raise ValueError(
                f"{path or 'The model'} is a {type(layer).__name__}, a subclass of BatchNorm "
                "with methods of its own, which a frozen layer would not have. Leave it out, "
                f"where=lambda path, layer: type(layer) is BatchNorm, or freeze it yourself: "
                "in its __call__, hand on inference=True."
            )
    return _replaced(model, chosen, FrozenBatchNorm)


def unfreeze(model: Model, where: Callable[[str, BatchNorm], bool] | None = None) -> Model:
    """Returns the model with frozen batch norms that learn again.

    They are in training or in inference mode as they were when they were frozen, or as
    `eqx.nn.inference_mode` has said since, and go on from what they remember.

    **Arguments:**

    - `model`: what `freeze` has returned, with its leaves trained further or not.
    - `where`: which of the frozen layers; all unless given.

    **Returns:** the model with a `BatchNorm` in place of each of these.

    **Raises:** `ValueError` if there is none of them.
    """
    return _replaced(model, _chosen(model, FrozenBatchNorm, where, "unfreeze"), BatchNorm)


def trainable(model: Any) -> Any:
    """Returns, in the model's structure, which leaves are trained: a bool for each.

    True are float and complex arrays, but for those of frozen layers. With it
    `eqx.partition(model, trainable(model))` splits a model into what is differentiated and the
    rest; and `optax.adamw(1e-3, mask=trainable)` or `optax.masked(optimiser, trainable)` leave
    frozen layers alone. (Give Optax the function: it would call a model of bools.)
    """
    return jax.tree.map(
        lambda node: _frozen_leaves(node) if _is_frozen(node) else eqx.is_inexact_array(node),
        model,
        is_leaf=_is_frozen,
    )


def _is_frozen(node: Any) -> bool:
    return isinstance(node, FrozenBatchNorm)


def _frozen_leaves(layer: Any) -> Any:
    return jax.tree.map(lambda _: False, layer)


def _constant(leaf: Any) -> Any:
    return jax.lax.stop_gradient(leaf) if eqx.is_inexact_array(leaf) else leaf


def _chosen(
    model: Any, kind: Kind, where: Callable[[str, BatchNorm], bool] | None, verb: str
) -> dict[str, BatchNorm]:
    """Returns the layers to replace by their paths; raises `ValueError` if there are none."""
    layers = found(model, kind)
    chosen = {p: layer for p, layer in layers.items() if where is None or where(p, layer)}
    if not chosen:
        name = getattr(kind, "__name__", "layer")
        raise ValueError(
            f"There is nothing to {verb}: "
            + (
                f"where= took none of {', '.join(path or 'the model' for path in layers)}. It "
                "is called with a layer's path and the layer."
                if layers
                else f"the model holds no eqx_norm {name}."
            )
        )
    return chosen


def _replaced(model: Model, chosen: dict[str, BatchNorm], cls: type[BatchNorm]) -> Model:
    def replaced(path: str, layer: BatchNorm) -> BatchNorm:
        return copied(layer, cls) if path in chosen else layer

    return each(model, BatchNorm, replaced)
