"""Defines `fold` and `fold_pairs`: a batch norm becomes part of the linear layer before it."""

from collections.abc import Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqx_norm import _contract, _memory
from eqx_norm._batch_norm import BatchNorm
from eqx_norm._normalise import Activation

from ._freeze import is_frozen
from ._layers import Kind, copied, found, listed, remembered_by, replaced

Model = TypeVar("Model")
Linear = TypeVar("Linear", bound=eqx.Module)

_LINEAR = (eqx.nn.Conv, eqx.nn.ConvTranspose, eqx.nn.Linear)
# Layers inside of these are used in two places, or with weights that are computed.
_WRAPPERS = (eqx.nn.Shared, eqx.nn.WeightNorm, eqx.nn.SpectralNorm)


def fold(linear: Linear, norm: BatchNorm, state: eqx.nn.State) -> Linear:
    r"""Returns the linear layer that does what both do in inference.

    A layer that is linear in its weight, $W x + b$, and the norm that follows are one,

    $$W' = s W, \qquad b' = s (b - \mu) + \beta, \qquad
      s = \frac{\gamma}{\sqrt{\sigma^2 + \varepsilon}}$$

    per output channel, with the remembered $\mu$ and $\sigma^2$: `eqx.nn.Linear`, and
    convolutions, transposed and grouped ones, too, whatever the padding. It is computed in
    float64 and rounded once, to the dtype of $W$.

    ```python
    conv = fold(conv, eqx.nn.inference_mode(norm), state)
    ```

    **Arguments:**

    - `linear`: an `eqx.nn.Linear`, `Conv` or `ConvTranspose`, whose output the norm is given.
    - `norm`: a layer of this package, in inference mode (`eqx.nn.inference_mode`) or frozen.
    - `state`: what it remembers; it stays valid.

    **Returns:** a new layer of the kind of `linear`, with a bias.

    **Raises:** `ValueError` if the two cannot be made one, saying why; also where the norm has
    an `activation`, which no linear layer does.

    Jacob et al., https://arxiv.org/abs/1712.05877, section 3.2; in PyTorch it is
    `torch.nn.utils.fusion.fuse_conv_bn_eval`.
    """
    if getattr(norm, "activation", None) is not None:
        raise ValueError(f"no linear layer does activation={norm.activation}; see fold_pairs.")
    return _folded(linear, norm, state)


def fold_pairs(
    model: Model, state: eqx.nn.State, pairs: Mapping[str, str]
) -> tuple[Model, eqx.nn.State]:
    """Returns the model with batch norms folded into the linear layers before them.

    ```python
    model = eqx.nn.inference_mode(model)
    model, state = fold_pairs(model, state, {"conv1": "bn1", "layers[0]": "layers[1]"})
    ```

    What the model does cannot be seen: that what the linear layer gives goes to the norm and
    nowhere else, and that the norm is given nothing else, is to be known by the user. Compare
    both models once.

    **Arguments:**

    - `model`, `state`: with norms in inference mode or frozen, and what they remember.
    - `pairs`: the paths of norms, by those of the layers before them.

    **Returns:** the model, in which each folded norm has given way to a `FoldedBatchNorm`, and
    the state without what they remembered.

    **Raises:** `ValueError` if a path is not that of such a layer, or a pair cannot be folded,
    saying which and why. Then nothing was folded.
    """
    new = dict[str, Any]()
    for linear, norm in pairs.items():
        try:
            layer, after = _at(linear, model, _LINEAR), _at(norm, model, eqx.nn.BatchNorm)
            new[linear] = _folded(layer, after, state)
        except ValueError as error:
            raise ValueError(f"pairs={{{linear!r}: {norm!r}}}: {error}") from error
        # pyright takes the parent's abstract `__call__` for a field.
        new[norm] = FoldedBatchNorm(after.activation)  # pyright: ignore[reportCallIssue]
    make = {path: lambda _, layer=layer: layer for path, layer in new.items()}
    return replaced(model, state, (*_LINEAR, eqx.nn.BatchNorm), make, lambda *_: {})


class FoldedBatchNorm(eqx.nn.StatefulLayer):
    """Stands where a batch norm stood that was folded into the layer before it: applies what
    was the norm's `activation`, if it had one, and hands on x and the state."""

    activation: Activation | None = None

    def __call__(
        self, x: Array, state: Any = None, *, key: Any = None, inference: Any = None
    ) -> Any:
        """**Arguments:** those of `BatchNorm` but `mask`; `key` and `inference` are ignored.

        **Returns:** `x`, or its `activation`; and the state, where one was given.
        """
        del key, inference
        y = x if self.activation is None else self.activation(x).astype(x.dtype)
        return y if state is None else (y, state)


def _at(path: str, model: Any, kind: Kind) -> Any:
    """Returns the layer at a path; raises `ValueError` for none, and for one in a wrapper."""
    layers = found(model, kind)
    if path not in layers:
        paths = listed(map(repr, layers)) or "none"
        raise ValueError(f"no such layer is at {path!r}; those of this model are {paths}.")
    for outer, wrapper in found(model, _WRAPPERS).items():
        if not outer or path.startswith((f"{outer}.", f"{outer}[")):
            kind_of = f"eqx.nn.{type(wrapper).__name__}"
            raise ValueError(f"{path} is in an {kind_of}, which shares or computes its weight.")
    return layers[path]


def _folded(layer: Any, norm: Any, state: eqx.nn.State) -> Any:
    if obstacle := _obstacle(layer, norm):
        raise ValueError(f"{obstacle}.")
    memory = remembered_by(norm, state)[0]["memory_index"]
    _memory.check(memory, norm.approach, norm.input_size)
    used = _contract.infer(norm.approach, memory, norm.input_size)
    mean, rest, variance = map(_host, (used.mean, used.mean_rest, used.variance))
    scale = 1 / np.sqrt(variance + norm.eps)
    if norm.weight is not None:
        scale = scale * _host(norm.weight)
    bias = np.zeros(norm.input_size) if layer.bias is None else _host(layer.bias).reshape(-1)
    bias = scale * (bias - mean - rest)
    if norm.bias is not None:
        bias = bias + _host(norm.bias)
    # A Linear's bias has one axis, a convolution's one for each of space as well.
    ones = (1,) * (layer.weight.ndim - 2)
    weight = _host(layer.weight) * scale.reshape(-1, 1, *ones)
    with np.errstate(over="ignore"):  # it is looked for afterwards
        weight, bias = (a.astype(layer.weight.dtype) for a in (weight, bias.reshape(-1, *ones)))
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise ValueError(f"what both do together is not finite in {weight.dtype}.")
    return copied(layer, use_bias=True, weight=jnp.asarray(weight), bias=jnp.asarray(bias))


def _obstacle(layer: Any, norm: Any) -> str | None:
    """Returns why a norm cannot be folded into a layer; `None` if it can."""
    kind, before = type(norm), type(layer)
    if kind is not BatchNorm:
        name = f"{kind.__module__}.{kind.__name__}"
        return f"the norm is a {name}; those of eqx.nn are to be swapped, eqx_norm.models.swap"
    if not (np.all(norm.inference) or is_frozen(norm)):
        return "the norm is in training mode: fold eqx.nn.inference_mode(model)"
    calls = next((cls for cls in before.__mro__ if "__call__" in vars(cls)), None)
    if calls not in _LINEAR:
        return (
            f"a {before.__name__} does not compute as eqx.nn.Linear, Conv or ConvTranspose do"
        )
    rank = 2 if isinstance(layer, eqx.nn.Linear) else layer.num_spatial_dims + 2
    if layer.weight.ndim != rank:
        return "the layers are those of an ensemble, whose members are to be folded one by one"
    if len(layer.weight) != norm.input_size:
        return f"the norm has {norm.input_size} channels, and the layer {len(layer.weight)}"
    for array in (layer.weight, layer.bias, norm.weight, norm.bias):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            return f"there are arrays of {array.dtype}, and only floats can be folded"
    return None


def _host(array: Array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
