"""Brings Flax's layers, of both its APIs, to the common form."""

from typing import Any

import jax.numpy as jnp
from flax import linen, nnx  # pyright: ignore[reportMissingImports]  (only with the peers)
from jax import Array

from . import Affine, Apply, Layer, names


def batch_norm(
    name: str, channels: int, affine: bool, *, momentum: float, eps: float, axis: int
) -> Layer:
    how = {
        "axis": axis,
        "momentum": momentum,
        "epsilon": eps,
        "use_scale": affine,
        "use_bias": affine,
        "use_fast_variance": name in (names.LINEN, names.NNX),
    }

    def parameters(given: Affine) -> dict[str, Any]:
        return {"scale": given[0], "bias": given[1]} if affine else {}

    def in_linen(inference: bool) -> Apply:
        def apply(given: Affine, memory: Any, x: Array) -> tuple[Array, Any]:
            layer = linen.BatchNorm(inference, dtype=x.dtype, **how)
            statistics = {"mean": memory[0], "var": memory[1]}
            variables = {"params": parameters(given), "batch_stats": statistics}
            y, after = layer.apply(variables, x, mutable=["batch_stats"])
            return y, (after["batch_stats"]["mean"], after["batch_stats"]["var"])

        return apply

    def in_nnx(inference: bool) -> Apply:
        def apply(given: Affine, memory: Any, x: Array) -> tuple[Array, Any]:
            layer = nnx.BatchNorm(channels, dtype=x.dtype, rngs=nnx.Rngs(0), **how)
            nnx.update(layer, {**parameters(given), "mean": memory[0], "var": memory[1]})
            y = layer(x, use_running_average=inference)
            after = nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat))
            return y, (after["mean"], after["var"])

        return apply

    mode = in_linen if name in (names.LINEN, names.LINEN_TWO_PASS) else in_nnx
    memory = jnp.zeros(channels), jnp.ones(channels)
    return Layer(memory, mode(False), mode(True), lambda memory: memory)


def layer_norm(name: str, shape: tuple[int, ...], eps: float) -> Layer:
    axes = tuple(range(1, 1 + len(shape)))

    def apply(affine: Affine, memory: Any, x: Array) -> tuple[Array, Any]:
        given = zip(("scale", "bias"), affine, strict=True)
        present = {key: value for key, value in given if value is not None}
        layer = linen.LayerNorm(
            epsilon=eps,
            dtype=x.dtype,
            use_scale="scale" in present,
            use_bias="bias" in present,
            reduction_axes=axes,
            feature_axes=axes,
            use_fast_variance=name == names.LINEN,
        )
        return layer.apply({"params": present}, x), memory

    return Layer((), apply, apply)
