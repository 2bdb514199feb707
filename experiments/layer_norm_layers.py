"""The layer norms that are compared: this one, Equinox's, Flax's and PyTorch's.

Each is used as its users would, at its defaults but for eps. Beside it stands what it gives
where a layer norm is made of a batch norm, as OneFlow's was: the examples for channels.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from numpy.typing import NDArray

from eqx_norm import BatchNorm, LayerNorm

EPS = 1e-5
OURS = "eqx-norm"


class Batch(NamedTuple):
    x: NDArray  # [N, *shape]
    dy: NDArray  # the gradient of the output, of the same shape and dtype
    weight: NDArray | None  # [*shape], in float32 at least
    bias: NDArray | None


class Answer(NamedTuple):
    y: NDArray
    dx: NDArray
    dweight: NDArray | None
    dbias: NDArray | None


class Layer(NamedTuple):
    name: str
    package: str  # that has to be installed
    answer: Callable[[Batch], Answer]
    by_batch_norm: Callable[[NDArray], NDArray]  # y of x, without weight and bias


# (weight, bias, x) to y; and x as [values, N], without weight and bias.
Forward = Callable[[Any, Any, Any], Any]


def _in_jax(forward: Forward) -> Callable[[Batch], Answer]:
    @jax.jit
    def differentiate(weight: Any, bias: Any, x: Any, dy: Any) -> tuple[Any, ...]:
        y, pull_back = jax.vjp(forward, weight, bias, x)
        return y, *pull_back(dy)

    def answer(batch: Batch) -> Answer:
        with jax.enable_x64(batch.x.dtype == np.float64):
            gave = differentiate(batch.weight, batch.bias, batch.x, batch.dy)
        y, dweight, dbias, dx = (None if a is None else np.asarray(a) for a in gave)
        assert y is not None
        assert dx is not None
        return Answer(y, dx, dweight, dbias)

    return answer


def _batch_norm_in_jax(forward: Callable[[Any], Any]) -> Callable[[NDArray], NDArray]:
    compiled = jax.jit(forward)

    def y(x: NDArray) -> NDArray:
        with jax.enable_x64(x.dtype == np.float64):
            return np.asarray(compiled(x.reshape(len(x), -1).T)).T.reshape(x.shape)

    return y


def _equinox(kind: Any, weight: Any, bias: Any, x: Any) -> Any:
    layer = kind(x.shape[1:], eps=EPS, use_weight=weight is not None, use_bias=bias is not None)
    layer = eqx.tree_at(
        lambda layer: (layer.weight, layer.bias),
        layer,
        (weight, bias),
        is_leaf=lambda leaf: leaf is None,
    )
    return jax.vmap(layer)(x)


def _equinox_batch_norm(make: Callable[[int], Any], x: Any) -> Any:
    layer, state = eqx.nn.make_with_state(make)(x.shape[1])
    return jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)[
        0
    ]


def _flax(fast: bool) -> Callable[[], tuple[Forward, Callable[[Any], Any]]]:
    def make() -> tuple[Forward, Callable[[Any], Any]]:
        from flax import linen  # pyright: ignore[reportMissingImports]  (only with the peers)

        def forward(weight: Any, bias: Any, x: Any) -> Any:
            axes = tuple(range(1, x.ndim))
            layer = linen.LayerNorm(
                epsilon=EPS,
                dtype=x.dtype,
                use_scale=weight is not None,
                use_bias=bias is not None,
                reduction_axes=axes,
                feature_axes=axes,
                use_fast_variance=fast,
            )
            given = {"scale": weight, "bias": bias}
            return layer.apply({"params": {k: v for k, v in given.items() if v is not None}}, x)

        def by_batch_norm(x: Any) -> Any:
            layer = linen.BatchNorm(
                use_running_average=False,
                epsilon=EPS,
                use_scale=False,
                use_bias=False,
                use_fast_variance=fast,
            )
            y, _ = layer.init_with_output(jax.random.key(0), x)
            return y

        return forward, by_batch_norm

    return functools.cache(make)


def _flax_layer(name: str, fast: bool) -> Layer:
    make = _flax(fast)

    # Imports Flax when it is first asked.
    @functools.cache
    def made() -> tuple[Callable[[Batch], Answer], Callable[[NDArray], NDArray]]:
        forward, by_batch_norm = make()
        return _in_jax(forward), _batch_norm_in_jax(by_batch_norm)

    return Layer(name, "flax", lambda batch: made()[0](batch), lambda x: made()[1](x))


def tensor(values: NDArray) -> Any:
    import torch  # pyright: ignore[reportMissingImports]  (only with the peers)

    # By way of float64, since torch reads no bfloat16 from NumPy; the values stay.
    copied = torch.from_numpy(np.array(values, np.float64, order="C"))
    return copied.to(getattr(torch, values.dtype.name))


def _torch(batch: Batch) -> Answer:
    import torch  # pyright: ignore[reportMissingImports]  (only with the peers)

    x, weight, bias = (
        None if values is None else tensor(values).requires_grad_()
        for values in (batch.x, batch.weight, batch.bias)
    )
    assert x is not None
    shape = batch.x.shape[1:]
    # torch 2.13 has no backward pass in bfloat16 for a bias in float32 alone.
    scale = torch.ones(shape) if weight is None and batch.bias is not None else weight
    scale = scale if bias is None or scale is None else scale.to(bias.dtype)
    y = torch.nn.functional.layer_norm(x, shape, scale, bias, EPS)
    y.backward(tensor(batch.dy))
    gave = (y, x.grad, *(None if v is None else v.grad for v in (weight, bias)))
    arrays: Any = (None if v is None else v.detach().double().numpy() for v in gave)
    return Answer(*arrays)


def _torch_batch_norm(x: NDArray) -> NDArray:
    import torch  # pyright: ignore[reportMissingImports]  (only with the peers)

    given = tensor(x.reshape(1, len(x), -1))
    y = torch.nn.functional.batch_norm(given, None, None, training=True, eps=EPS)
    return y.double().numpy().reshape(x.shape)


def _ours_of(channels: int) -> BatchNorm:
    return BatchNorm(channels, "batch", EPS, channelwise_affine=False, approach="batch")


def _equinox_of(channels: int) -> eqx.nn.BatchNorm:
    return eqx.nn.BatchNorm(channels, "batch", EPS, channelwise_affine=False, mode="batch")


def _of_equinox(name: str, package: str, kind: Any, make: Callable[[int], Any]) -> Layer:
    return Layer(
        name,
        package,
        _in_jax(functools.partial(_equinox, kind)),
        _batch_norm_in_jax(functools.partial(_equinox_batch_norm, make)),
    )


LAYERS = (
    _of_equinox(OURS, "eqx_norm", LayerNorm, _ours_of),
    _of_equinox("Equinox", "equinox", eqx.nn.LayerNorm, _equinox_of),
    # Flax's default is the variance of one pass, E[x^2] - E[x]^2: use_fast_variance.
    _flax_layer("Flax", fast=True),
    _flax_layer("Flax, two-pass", fast=False),
    Layer("PyTorch", "torch", _torch, _torch_batch_norm),
)
# What the package itself needs is always there.
ALWAYS = tuple(layer for layer in LAYERS if layer.package in ("eqx_norm", "equinox"))
