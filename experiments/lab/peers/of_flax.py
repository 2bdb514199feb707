"""Flax's layers, of both its APIs."""

from typing import Any

import jax.numpy as jnp
from flax import linen, nnx  # pyright: ignore[reportMissingImports]  (only with the peers)
from jax import Array

from . import names
from .layer import Affine, Apply, BatchNorm, Layer, LayerNorm


def batch_norm(name: str, settings: BatchNorm) -> Layer:
    zeros, ones = jnp.zeros(settings.channels), jnp.ones(settings.channels)
    fast = name in (names.LINEN, names.NNX)
    made = _linen if name in (names.LINEN, names.LINEN_TWO_PASS) else _nnx
    return Layer(
        (zeros, ones), made(settings, fast, False), made(settings, fast, True), lambda m: m
    )


def layer_norm(name: str, settings: LayerNorm) -> Layer:
    axes = tuple(range(1, 1 + len(settings.shape)))

    def apply(affine: Affine, memory: Any, x: Array) -> tuple[Array, Any]:
        given = {"scale": affine[0], "bias": affine[1]}
        layer = linen.LayerNorm(
            epsilon=settings.eps,
            dtype=x.dtype,
            use_scale=affine[0] is not None,
            use_bias=affine[1] is not None,
            reduction_axes=axes,
            feature_axes=axes,
            use_fast_variance=name == names.LINEN,
        )
        present = {key: value for key, value in given.items() if value is not None}
        return layer.apply({"params": present}, x), memory

    return Layer((), apply, apply)


def _linen(settings: BatchNorm, fast: bool, inference: bool) -> Apply:
    def apply(affine: Affine, memory: Any, x: Array) -> tuple[Array, Any]:
        layer = linen.BatchNorm(
            inference,
            axis=settings.channel_axis,
            momentum=settings.momentum,
            epsilon=settings.eps,
            dtype=x.dtype,
            use_scale=settings.affine,
            use_bias=settings.affine,
            use_fast_variance=fast,
        )
        parameters = {"scale": affine[0], "bias": affine[1]} if settings.affine else {}
        variables = {"params": parameters, "batch_stats": {"mean": memory[0], "var": memory[1]}}
        y, after = layer.apply(variables, x, mutable=["batch_stats"])
        return y, (after["batch_stats"]["mean"], after["batch_stats"]["var"])

    return apply


def _nnx(settings: BatchNorm, fast: bool, inference: bool) -> Apply:
    def apply(affine: Affine, memory: Any, x: Array) -> tuple[Array, Any]:
        layer = nnx.BatchNorm(
            settings.channels,
            axis=settings.channel_axis,
            momentum=settings.momentum,
            epsilon=settings.eps,
            dtype=x.dtype,
            use_scale=settings.affine,
            use_bias=settings.affine,
            use_fast_variance=fast,
            rngs=nnx.Rngs(0),
        )
        parameters = {"scale": affine[0], "bias": affine[1]} if settings.affine else {}
        nnx.update(layer, {**parameters, "mean": memory[0], "var": memory[1]})
        y = layer(x, use_running_average=inference)
        after = nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat))
        return y, (after["mean"], after["var"])

    return apply
