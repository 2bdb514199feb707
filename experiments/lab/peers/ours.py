"""Brings the layers of this package to the common form, as Equinox's are."""

from typing import Any

import equinox as eqx
from jax import Array

from eqx_norm import BatchNorm, LayerNorm

from . import AXIS, Layer, names
from .of_equinox import stateful, stateless

_IMPLEMENTATIONS: dict[str, Any] = {names.OURS_XLA: "xla", names.OURS_PALLAS: "pallas"}


def batch_norm(name: str, channels: int, affine: bool, **keywords: Any) -> Layer:
    how = {
        "channelwise_affine": affine,
        "approach": "batch",
        "unbiased": name == names.OURS_UNBIASED,
        "implementation": _IMPLEMENTATIONS.get(name, "auto"),
        **keywords,
    }
    return stateful(lambda: BatchNorm(channels, AXIS, **how), _statistics)


def layer_norm(name: str, shape: tuple[int, ...], eps: float, **keywords: Any) -> Layer:
    how = {"implementation": _IMPLEMENTATIONS.get(name, "auto"), **keywords}
    return stateless(lambda weight, bias: LayerNorm(shape, eps, weight, bias, **how))


def _statistics(made: Any, state: eqx.nn.State) -> tuple[Array, ...]:
    running = state.get(made.memory_index)
    return running.mean, running.variance, running.weight, state.get(made.rejected_index)
