"""Brings the layers of this package to the common form, as Equinox's are."""

from typing import Any

import equinox as eqx
import jax
from jax import Array

from eqx_norm import BatchNorm, LayerNorm

from . import layer, names
from .of_equinox import stateful, stateless

_IMPLEMENTATIONS: dict[str, Any] = {
    names.OURS_XLA: "xla",
    names.OURS_TRITON: "pallas_triton",
    names.OURS_MOSAIC: "pallas_mosaic",
    names.OURS_INVARIANT: "device_invariant",
}


def batch_norm(
    name: str, settings: layer.BatchNorm, *, activation: Any = None, **keywords: Any
) -> layer.Layer:
    """Returns the layer; further keywords are those of `eqx_norm.BatchNorm`."""

    def make() -> BatchNorm:
        channels, momentum, eps, _, affine = settings
        how: dict[str, Any] = {
            "approach": "batch",
            "activation": activation,
            "unbiased": name == names.OURS_UNBIASED,
            "implementation": _IMPLEMENTATIONS.get(name, "auto"),
        }
        return BatchNorm(channels, layer.AXIS, eps, affine, momentum, **{**how, **keywords})

    return stateful(make, _statistics)


def batch_norm_and_relu(name: str, settings: layer.BatchNorm) -> layer.Layer:
    """Returns the layer with a ReLU of its own."""
    return batch_norm(name, settings, activation=jax.nn.relu)


def layer_norm(name: str, settings: layer.LayerNorm, **keywords: Any) -> layer.Layer:
    how: dict[str, Any] = {"implementation": _IMPLEMENTATIONS.get(name, "auto"), **keywords}
    return stateless(lambda weight, bias: LayerNorm(*settings, weight, bias, **how))


def _statistics(made: Any, state: eqx.nn.State) -> tuple[Array, ...]:
    running = state.get(made.memory_index)
    return running.mean, running.variance, running.weight, state.get(made.rejected_index)
