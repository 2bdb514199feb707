"""Merges batch norms into the linear layers before them, and proposes pairs of layers."""

from collections.abc import Hashable, Mapping
from types import ModuleType
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree, Shaped

from eqx_norm import _contract, _memory
from eqx_norm._batch_norm import BatchNorm
from eqx_norm._normalise import Activation
from eqx_norm.strategies._numbers import cast

from . import _layers
from ._freeze import is_frozen
from ._layers import LINEAR, Kind, Model, layers_of

# These wrappers use the layer inside in two places, or compute the layer's weight.
_WRAPPERS = (eqx.nn.Shared, eqx.nn.WeightNorm, eqx.nn.SpectralNorm)


def fold_pairs(
    model: Model, state: eqx.nn.State, pairs: Mapping[str, str]
) -> tuple[Model, eqx.nn.State]:
    r"""Returns the model and state with batch norms folded into the linear layers before them.

    ```python
    model = eqx.nn.inference_mode(model)
    model, state = fold_pairs(model, state, {"conv1": "bn1", "layers[0]": "layers[1]"})
    ```

    For a layer $W x + b$ followed by a norm with running mean $\mu$ and variance $\sigma^2$,
    the new weight and bias are, for each output channel,

    $$W' = s W, \qquad b' = s (b - \mu) + \beta, \qquad
      s = \frac{\gamma}{\sqrt{\sigma^2 + \varepsilon}},$$

    computed in float64 and rounded once, to the dtype of $W$. Convolutions may be transposed or
    grouped, with any padding. Under `jax.jit` and `jax.grad`, for quantisation-aware training,
    the formula is computed in float32 or better, and nothing checks that its values are finite.

    `fold_pairs` does not see how the model calls its layers. You must know that the output of
    each linear layer goes to its norm and nowhere else, and that the norm has no other input.
    Compare the outputs of both models once.

    **Arguments:**

    - `model`, `state`: a model whose norms are in inference mode or frozen, and its state.
    - `pairs`: a mapping from the path of each linear layer to the path of the norm after it:
        `{"[0]": "[1]"}` if the model is `[conv, norm]`. `propose_pairs(model)` returns a first
        version of this mapping.

    **Returns:** the model with a `FoldedBatchNorm` in place of each folded norm, and the state
    without the statistics of the folded norms.

    **Raises:** `ValueError` if a path leads to no such layer or a pair cannot be folded; the
    message names the pair and the reason.

    Jacob et al., https://arxiv.org/abs/1712.05877, section 3.2. PyTorch's function is
    `torch.nn.utils.fusion.fuse_conv_bn_eval`.
    """
    _layers.checked_entries(model, state, layers_of(model, eqx.nn.BatchNorm))
    hint = 'paths of linear layers to those of norms. Write {"conv1": "bn1"}, or dict(pairs).'
    if not _layers.checked_mapping("pairs", pairs, hint):
        raise ValueError(f"pairs is empty: there is nothing to fold. Pass a mapping of {hint}")
    folded = dict[str, PyTree]()
    markers = set[Hashable]()
    for linear_path, norm_path in pairs.items():
        try:
            linear = _layer_at(linear_path, model, LINEAR)
            norm = _layer_at(norm_path, model, eqx.nn.BatchNorm)
            memories = state
            if is_frozen(norm):  # computes with constants, and so does the folded layer
                norm, memories = _without_gradients((norm, state))
            folded[linear_path] = _folded(linear, norm, memories)
        except ValueError as error:
            raise ValueError(f"pairs={{{linear_path!r}: {norm_path!r}}}: {error}") from error
        # pyright takes the parent's abstract `__call__` for a field.
        folded[norm_path] = FoldedBatchNorm(norm.activation)  # pyright: ignore[reportCallIssue]
        markers.add(norm.memory_index.marker)
    model = _layers.with_nodes(model, folded)
    return model, _layers.with_entries(model, state, {}, markers)


def propose_pairs(model: Any) -> dict[str, str]:
    """Returns `pairs` for `fold_pairs`, guessed from the order of the model's layers.

    ```python
    pairs = propose_pairs(model)
    print(*pairs.items(), sep="\\n")  # read them, and edit them
    folded, left = fold_pairs(eqx.nn.inference_mode(model), state, pairs)
    ```

    A pair is a linear layer or convolution and the batch norm directly after it in the same
    module, list or dictionary, with one channel for each output. Fields are in the order of the
    class, entries of a dictionary in the order of sorted keys.

    **`propose_pairs` cannot see** how the model calls its layers: a function between the two,
    in `__call__` or a static field; an output that also goes elsewhere; a norm that is called
    before its convolution, or gets a sum. Delete such pairs, and compare the outputs once.

    **No pair is proposed** for layers in different modules; for two norms in a row, as in a
    block that declares all convolutions first; and for layers that `fold_pairs` refuses, which
    folds all pairs or none. Add the pairs that you know. (Norms of `eqx.nn` are proposed:
    `swap` them first. For an ensemble, the pairs apply to each member.)

    **Arguments:** `model`: any pytree of layers, in training or inference mode.

    **Returns:** a dictionary from the path of each linear layer to the path of its norm.
    """

    _layers.check_model(model)

    def is_layer(node: PyTree) -> bool:
        # Layers without arrays, such as a pooling layer, also separate two layers.
        is_empty = node is not None and not jtu.tree_leaves(node)
        return is_empty or isinstance(node, (*LINEAR, *_WRAPPERS, eqx.nn.BatchNorm))

    pairs = dict[str, str]()
    nodes = [*jtu.tree_leaves_with_path(model, is_leaf=is_layer), ((), None)]
    triples = zip(nodes, nodes[1:], nodes[2:], strict=False)
    for (first, linear), (second, norm), (third, other) in triples:
        is_pair = isinstance(linear, LINEAR) and isinstance(norm, eqx.nn.BatchNorm)
        two_norms = isinstance(other, eqx.nn.BatchNorm) and second[:-1] == third[:-1]
        if is_pair and first[:-1] == second[:-1] and not (two_norms or _mismatch(linear, norm)):
            pairs[_layers.path_of(first)] = _layers.path_of(second)
    return pairs


class FoldedBatchNorm(eqx.nn.StatefulLayer):
    """Replaces a folded batch norm, and applies the norm's `activation`, if any."""

    activation: Activation | None = None

    @overload
    def __call__(
        self, x: Inexact[Array, "..."], *, key: object = None, inference: object = None
    ) -> Inexact[Array, "..."]: ...

    @overload
    def __call__(
        self,
        x: Inexact[Array, "..."],
        state: Any,
        *,
        key: object = None,
        inference: object = None,
    ) -> tuple[Inexact[Array, "..."], Any]: ...

    def __call__(
        self,
        x: Inexact[Array, "*shape"],
        state: Any = None,
        *,
        key: object = None,
        inference: object = None,
    ) -> Inexact[Array, "*shape"] | tuple[Inexact[Array, "*shape"], Any]:
        """Returns `x`, or `activation(x)` in the dtype of `x`, and the state if one is given;
        the arguments are those of `BatchNorm` except `mask`."""
        del key, inference
        y = x
        if self.activation is not None:
            name = f"the result of activation={self.activation}"
            y = cast(name, self.activation(x), x.dtype)
        return y if state is None else (y, state)


def _layer_at(path: str, model: PyTree, kind: Kind) -> PyTree:
    """Returns the layer at a path; raises `ValueError` if it is missing or in a wrapper."""
    layers = layers_of(model, kind)
    if path not in layers:
        what = "batch norm" if kind is eqx.nn.BatchNorm else "linear layer or convolution"
        paths = _layers.listed(map(repr, layers)) or "none"
        raise ValueError(f"there is no {what} at {path!r}. Paths in this model: {paths}.")
    for outer, wrapper in layers_of(model, _WRAPPERS).items():
        if not outer or path.startswith((f"{outer}.", f"{outer}[")):
            name = f"eqx.nn.{type(wrapper).__name__}"
            raise ValueError(f"{path} is in an {name}, which shares or computes its weight.")
    return layers[path]


def _folded(layer: PyTree, norm: PyTree, state: eqx.nn.State) -> PyTree:
    _layers.check_single(layer, norm)
    if obstacle := _obstacle(layer, norm):
        raise ValueError(f"{obstacle}.")
    memory = _memory.recall(norm, state)
    moments = _contract.running(norm, memory.statistics)
    if jnp.iscomplexobj(moments.mean):
        raise ValueError(f"the norm is complex, and the layer has {layer.weight.dtype}.")
    is_traced = _layers.is_traced(layer, norm, moments)
    # NumPy computes in float64, whether JAX has it or not.
    xp = jnp if is_traced else np
    mean = _vector(xp, moments.mean) + _vector(xp, moments.mean_pair.rest)
    scale = 1.0 if norm.weight is None else norm.weight_offset + _vector(xp, norm.weight)
    scale = scale / xp.sqrt(_vector(xp, moments.variance) + norm.eps)
    bias = scale * (_vector(xp, layer.bias) - mean) + _vector(xp, norm.bias)
    # The bias of a Linear has one axis; a convolution's bias has its spatial axes, too.
    spatial = (1,) * (layer.weight.ndim - 2)
    weight = xp.asarray(layer.weight, float) * scale.reshape(-1, 1, *spatial)
    with np.errstate(over="ignore"):  # checked below
        weight = weight.astype(layer.weight.dtype)
        bias = bias.reshape(-1, *spatial).astype(layer.weight.dtype)
    if not (is_traced or (np.isfinite(weight).all() and np.isfinite(bias).all())):
        raise ValueError(f"the folded layer is not finite in {weight.dtype}; use float32.")
    weight, bias = jnp.asarray(weight), jnp.asarray(bias)
    return _layers.copied(layer, use_bias=True, weight=weight, bias=bias)


def _obstacle(layer: PyTree, norm: PyTree) -> str | None:
    """Returns why a norm cannot be folded into a layer; `None` if it can."""
    if type(norm) is not BatchNorm:
        name = f"{type(norm).__module__}.{type(norm).__name__}"
        if isinstance(norm, BatchNorm):
            return f"{name} is a subclass: give it a field, self.norm = BatchNorm(...), to fold"
        return f"the norm is a {name}; convert norms of eqx.nn by eqx_norm.models.swap first"
    if _layers.is_traced(norm.inference):
        return "the norm's flag inference is traced by jax.jit: use eqx.filter_jit"
    if not (np.all(norm.inference) or is_frozen(norm)):
        return "the norm is in training mode: fold eqx.nn.inference_mode(model)"
    return _mismatch(layer, norm)


def _mismatch(layer: PyTree, norm: PyTree) -> str | None:
    """Returns why no norm of this size can be folded into a layer; `None` if one can."""
    calls = next((cls for cls in type(layer).__mro__ if "__call__" in vars(cls)), None)
    if calls not in LINEAR:
        known = "eqx.nn.Linear, Conv and ConvTranspose"
        return f"only {known} can be folded; {type(layer).__name__} has another __call__"
    outputs = layer.weight.shape[_layers.axes_in_front(layer)]
    if outputs != norm.input_size:
        return f"the norm has {norm.input_size} channels, but the layer returns {outputs}"
    if not jnp.issubdtype(layer.weight.dtype, jnp.floating):
        return f"the layer has arrays of {layer.weight.dtype}; only floats can be folded"
    for array in (layer.bias, norm.weight, norm.bias):
        if array is not None and jnp.iscomplexobj(array):
            return f"{array.dtype} cannot be folded into a layer of {layer.weight.dtype}"
    return None


def _vector(
    xp: ModuleType, array: Shaped[Array | np.ndarray, "..."] | None
) -> Float[Array | np.ndarray, " channels"]:
    """Returns an array as a vector of `xp`, in float64 for NumPy and in the default float dtype
    for `jax.numpy`; returns a vector of one 0 for `None`."""
    return xp.asarray(0.0 if array is None else array, float).reshape(-1)


def _without_gradients(tree: PyTree) -> PyTree:
    """Returns the tree with traced arrays that no gradient reaches."""
    stop = jax.lax.stop_gradient
    return jax.tree.map(lambda a: stop(a) if _layers.is_traced(a) else a, tree)
