"""Defines `fold`, which makes one layer of a linear one and the batch norm that follows it."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, PRNGKeyArray

from eqx_norm import _contract, _memory
from eqx_norm._batch_norm import BatchNorm
from eqx_norm._normalise import Activation

from ._freeze import FrozenBatchNorm
from ._layers import copied, each, entries, found, state_of

Model = TypeVar("Model")

_LINEAR = (eqx.nn.Conv, eqx.nn.ConvTranspose, eqx.nn.Linear)


class FoldedBatchNorm(eqx.nn.StatefulLayer):
    """Stands where a batch norm stood that was folded into the layer before it: applies what
    was the norm's `activation`, if it had one, and hands on x and the state."""

    activation: Activation | None

    def __init__(self, activation: Activation | None):
        """**Arguments:** `activation`: the norm's."""
        self.activation = activation

    def __call__(
        self,
        x: Array | np.ndarray,
        state: Any = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | Bool[Array, ""] | None = None,
        mask: Bool[ArrayLike, "..."] | None = None,
    ) -> Any:
        """**Arguments:** those of `BatchNorm`. `key` is ignored, and so is a traced
        `inference`.

        **Returns:** `x`, or its `activation`; and the state, where one was given.

        **Raises:** `ValueError` for a `mask`, and for `inference=False`.
        """
        del key
        if mask is not None or (isinstance(inference, bool) and not inference):
            given = "mask=" if mask is not None else "inference=False"
            raise ValueError(
                f"{given} was given to a batch norm that `fold` has folded into the layer "
                "before it: there is nothing left here to be masked or trained. Use the model "
                "from before fold, or leave this layer out of its pairs=."
            )
        x = jnp.asarray(x)
        y = x if self.activation is None else self.activation(x).astype(x.dtype)
        return y if state is None else (y, state)


class FoldReport(NamedTuple):
    """Lists what `fold` has done; prints as a table.

    **Fields:** `folded`: pairs of paths, of the linear layer and of the norm that is now part
    of it. `left`: the paths of the other norms, each with the reason.
    """

    folded: tuple[tuple[str, str], ...]
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        rows = [("folded", layer, "<- " + norm) for layer, norm in self.folded]
        rows += [("left", norm, reason) for norm, reason in self.left]
        width = max((len(path) for _, path, _ in rows), default=0)
        lines = [f"{kind:6}  {path:{width}}  {rest}" for kind, path, rest in rows]
        return "\n".join(lines) or "no batch norm"


def fold(
    model: Model, state: eqx.nn.State, pairs: Mapping[str, str] | None = None
) -> tuple[Model, eqx.nn.State, FoldReport]:
    r"""Returns the model with batch norms folded into the linear layers before them.

    In inference, a convolution or linear layer $W x + b$ and the norm that follows are one,

    $$W' = s W, \qquad b' = s (b - \mu) + \beta, \qquad
      s = \frac{\gamma}{\sqrt{\sigma^2 + \varepsilon}}$$

    per output channel, with the remembered $\mu$ and $\sigma^2$. This holds for transposed and
    grouped convolutions and whatever the padding. It is computed in float64 and rounded once,
    to the dtype of $W$.

    ```python
    import equinox as eqx
    import jax
    from eqx_norm import BatchNorm
    from eqx_norm.models import fold


    def build(key):
        conv = eqx.nn.Conv2d(3, 4, 3, use_bias=False, key=key)
        return eqx.nn.Sequential([conv, BatchNorm(4, "batch", approach="batch")])


    model, state = eqx.nn.make_with_state(build)(jax.random.key(0))
    folded, left, report = fold(eqx.nn.inference_mode(model), state)
    y, _ = folded(jax.numpy.ones((3, 8, 8)), left)
    print(report)  # folded  layers[0]  <- layers[1]
    ```

    Direct neighbours in an `eqx.nn.Sequential` are found: both in the same one, not across the
    border of another inside it. All others are named by `pairs`. What the model does elsewhere
    cannot be seen: that what the first layer gives goes to the norm and nowhere else, and that
    the norm is given nothing else, is to be known by the user. Compare both models once.

    **Arguments:**

    - `model`: in inference mode (`eqx.nn.inference_mode`), or with frozen norms; not traced.
    - `state`: what its norms remember; it stays valid.
    - `pairs`: further norms, by the path of the layer before each: `{"conv1": "bn1"}`.

    **Returns:** the model, in which each folded norm has given way to a `FoldedBatchNorm`; the
    state without what they remembered; and a `FoldReport`. Norms that cannot be folded are
    left, with the reason: one in training mode, one that follows something else, one of an
    ensemble or of complex numbers, one whose layer has a `__call__` of its own, and what is
    inside of an `eqx.nn.Shared`.

    **Raises:** `ValueError` if a path in `pairs` is not that of such a layer, if a pair that it
    names cannot be folded, or contradicts a `Sequential`; and for a state of another model.

    Jacob et al., https://arxiv.org/abs/1712.05877, section 3.2; in PyTorch it is
    `torch.nn.utils.fusion.fuse_conv_bn_eval`.
    """
    named, (beside, left) = dict(pairs or {}), _beside(model)
    layers, norms = found(model, _LINEAR), found(model, eqx.nn.BatchNorm)
    _check_named(named, beside, layers, norms)
    shared, new, folded = tuple(found(model, eqx.nn.Shared)), dict[str, Any](), []
    for layer, norm in (beside | named).items():
        if any(_inside(path, outer) for path in (layer, norm) for outer in shared):
            merged = "is inside of an eqx.nn.Shared, which may use it in two places"
        else:
            merged = _merged(layers[layer], norms[norm], state)
        if not isinstance(merged, str):
            new[layer] = merged
            new[norm] = FoldedBatchNorm(norms[norm].activation)
            folded.append((layer, norm))
        elif layer in named:
            raise ValueError(f"pairs={{{layer!r}: {norm!r}}}: {norm} {merged}.")
        else:
            left[norm] = merged
    kept = {path: norm for path, norm in norms.items() if path not in new}
    unknown = "follows nothing in a Sequential: name the layer before it in pairs="
    report = FoldReport(tuple(folded), tuple((path, left.get(path, unknown)) for path in kept))
    before = _markers(model)
    model = each(model, (*_LINEAR, eqx.nn.BatchNorm), lambda path, old: new.get(path, old))
    gone = before - _markers(model)
    held = {marker: value for marker, value in entries(state).items() if marker not in gone}
    return model, state_of(model, held), report


def _beside(model: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the pairs of neighbours in a `Sequential`, and why its other norms have none."""
    pairs, left = dict[str, str](), dict[str, str]()
    for path, sequential in _sequentials(model):
        before = None
        for i, layer in enumerate(sequential.layers):
            name = f"{path}layers[{i}]"
            if isinstance(layer, eqx.nn.BatchNorm):
                if isinstance(before, _LINEAR):
                    pairs[f"{path}layers[{i - 1}]"] = name
                else:
                    left[name] = (
                        "is the first of its Sequential"
                        if i == 0
                        else f"follows a {type(before).__name__}"
                    )
            before = layer
    return pairs, left


def _sequentials(model: Any, prefix: str = "") -> Iterator[tuple[str, eqx.nn.Sequential]]:
    """Yields each `Sequential` with what the paths of its fields start with."""
    for path, node in found(model, eqx.nn.Sequential).items():
        inner = prefix + path + ("." if prefix + path else "")
        if type(node) is eqx.nn.Sequential:  # a subclass may call its layers in its own way
            yield inner, node
        yield from _sequentials(node.layers, f"{inner}layers")


def _check_named(
    named: dict[str, str], beside: dict[str, str], layers: dict[str, Any], norms: dict[str, Any]
) -> None:
    """Raises `ValueError` unless `pairs` names layers, and what a `Sequential` does not do."""
    follows = {norm: layer for layer, norm in beside.items()}
    for layer, norm in named.items():
        for path, known, kind in ((layer, layers, "linear layer"), (norm, norms, "batch norm")):
            if path not in known:
                raise ValueError(
                    f"pairs={{{layer!r}: {norm!r}}}: there is no {kind} at {path!r}. Those of "
                    f"this model are {', '.join(map(repr, known)) or 'none'}."
                )
        if beside.get(layer, norm) != norm or follows.get(norm, layer) != layer:
            before = next(pair for pair in beside.items() if layer in pair or norm in pair)
            raise ValueError(
                f"pairs={{{layer!r}: {norm!r}}}: in their Sequential {before[1]} follows "
                f"{before[0]}. Leave that pair out, it is found by itself."
            )


def _obstacle(layer: Any, norm: Any) -> str | None:
    """Returns why the norm cannot be folded into the layer; `None` if it can."""
    kind = type(norm)
    if not isinstance(norm, BatchNorm):
        return f"is not of eqx_norm but {kind.__module__.split('.')[0]}'s {kind.__name__}"
    if kind not in (BatchNorm, FrozenBatchNorm):
        return f"is a {kind.__name__}, a subclass with methods of its own"
    if kind is BatchNorm and not np.all(norm.inference):
        return "is in training mode: fold(eqx.nn.inference_mode(model), state)"
    calls = next(cls for cls in type(layer).__mro__ if "__call__" in vars(cls))
    if calls not in _LINEAR:
        return f"follows a {type(layer).__name__}, which computes in a way of its own"
    is_linear = isinstance(layer, eqx.nn.Linear)
    if is_linear and layer.out_features == "scalar":
        return "follows a Linear with out_features='scalar', which has no channels"
    channels = layer.out_features if is_linear else layer.out_channels
    if channels != norm.input_size:
        return f"has {norm.input_size} channels, and the layer before it gives {channels}"
    if layer.weight.ndim != (2 if is_linear else layer.num_spatial_dims + 2):
        return "is an ensemble's, with one axis more: fold each member by itself"
    arrays = (layer.weight, layer.bias, norm.weight, norm.bias)
    if any(array is not None and jnp.iscomplexobj(array) for array in arrays):
        return "is of complex numbers"
    return None


def _merged(layer: Any, norm: Any, state: eqx.nn.State) -> Any:
    """Returns the linear layer that does what both do in inference; or why there is none."""
    obstacle = _obstacle(layer, norm)
    if obstacle is not None:
        return obstacle
    memory = _memory.recall(state, norm.memory_index, norm.approach, norm.input_size)
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
        return "would make a weight that is not finite"
    return copied(layer, use_bias=True, weight=jnp.asarray(weight), bias=jnp.asarray(bias))


def _host(array: Array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def _markers(model: Any) -> set[Any]:
    return {index.marker for index in found(model, eqx.nn.StateIndex).values()}


def _inside(path: str, outer: str) -> bool:
    return not outer or path.startswith((f"{outer}.", f"{outer}["))
