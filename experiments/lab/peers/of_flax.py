"""Brings Flax's layers, of both its APIs, to the common form."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import linen, nnx  # pyright: ignore[reportMissingImports]  (only with the peers)
from jax import Array

from . import names
from .layer import Affine, BatchNorm, Layer, LayerNorm


def batch_norm(name: str, settings: BatchNorm) -> Layer:
    zeros, ones = jnp.zeros(settings.channels), jnp.ones(settings.channels)
    apply = _linen if name in (names.LINEN, names.LINEN_TWO_PASS) else _nnx
    how = {
        "axis": settings.channel_axis,
        "momentum": settings.momentum,
        "epsilon": settings.eps,
        "use_scale": settings.affine,
        "use_bias": settings.affine,
        "use_fast_variance": name in (names.LINEN, names.NNX),
    }
    train, evaluate = (functools.partial(apply, settings, how, mode) for mode in (False, True))
    return Layer((zeros, ones), train, evaluate, lambda memory: memory)


def layer_norm(name: str, settings: LayerNorm) -> Layer:
    axes = tuple(range(1, 1 + len(settings.shape)))

    def apply(affine: Affine, memory: Any, x: Array) -> tuple[Array, Any]:
        given = zip(("scale", "bias"), affine, strict=True)
        present = {key: value for key, value in given if value is not None}
        layer = linen.LayerNorm(
            epsilon=settings.eps,
            dtype=x.dtype,
            use_scale="scale" in present,
            use_bias="bias" in present,
            reduction_axes=axes,
            feature_axes=axes,
            use_fast_variance=name == names.LINEN,
        )
        return layer.apply({"params": present}, x), memory

    return Layer((), apply, apply)


def _linen(
    settings: BatchNorm, how: Any, inference: bool, affine: Affine, memory: Any, x: Array
) -> tuple[Array, Any]:
    layer = linen.BatchNorm(inference, dtype=x.dtype, **how)
    parameters = {"scale": affine[0], "bias": affine[1]} if settings.affine else {}
    variables = {"params": parameters, "batch_stats": {"mean": memory[0], "var": memory[1]}}
    y, after = layer.apply(variables, x, mutable=["batch_stats"])
    return y, (after["batch_stats"]["mean"], after["batch_stats"]["var"])


def _nnx(
    settings: BatchNorm, how: Any, inference: bool, affine: Affine, memory: Any, x: Array
) -> tuple[Array, Any]:
    layer = nnx.BatchNorm(settings.channels, dtype=x.dtype, rngs=nnx.Rngs(0), **how)
    parameters = {"scale": affine[0], "bias": affine[1]} if settings.affine else {}
    nnx.update(layer, {**parameters, "mean": memory[0], "var": memory[1]})
    y = layer(x, use_running_average=inference)
    after = nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat))
    return y, (after["mean"], after["var"])
