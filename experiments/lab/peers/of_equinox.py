"""Brings Equinox's layers, and any layer of that kind, to the common form."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax import Array

from . import AXIS, Affine, Apply, Layer, names


def batch_norm(name: str, channels: int, affine: bool, **settings: Any) -> Layer:
    ema = name == names.EQUINOX_EMA
    settings |= {"channelwise_affine": affine, "mode": "ema" if ema else "batch"}

    def statistics(layer: Any, state: eqx.nn.State) -> tuple[Array, ...]:
        if ema:
            return (*state.get(layer.ema_state_index), state.get(layer.ema_first_time_index))
        return (*state.get(layer.batch_state_index), state.get(layer.batch_counter))

    return stateful(lambda: eqx.nn.BatchNorm(channels, AXIS, **settings), statistics)


def layer_norm(name: str, shape: tuple[int, ...], eps: float) -> Layer:
    return stateless(lambda weight, bias: eqx.nn.LayerNorm(shape, eps, weight, bias))


def stateful(
    make: Callable[[], Any], statistics: Callable[[Any, eqx.nn.State], tuple[Array, ...]]
) -> Layer:
    """Returns a layer that takes one example and a state, mapped over a batch."""
    layer, state = eqx.nn.make_with_state(make)()
    leaves, structure = jax.tree.flatten(state)

    def mode(inference: bool) -> Apply:
        def apply(affine: Affine, memory: Any, x: Array) -> tuple[Array, Any]:
            model = eqx.nn.inference_mode(_with_affine(layer, affine), inference)
            mapped = jax.vmap(model, axis_name=AXIS, in_axes=(0, None), out_axes=(0, None))
            y, state = mapped(x, jax.tree.unflatten(structure, memory))
            return y, tuple(jax.tree.leaves(state))

        return apply

    def read(memory: Any) -> tuple[Array, ...]:
        return statistics(layer, jax.tree.unflatten(structure, memory))

    return Layer(tuple(leaves), mode(False), mode(True), read)


def stateless(make: Callable[[bool, bool], Any]) -> Layer:
    """Returns a layer that takes one example, mapped over several; made with weight, bias."""

    def apply(affine: Affine, memory: Any, x: Array) -> tuple[Array, Any]:
        layer = make(*(parameter is not None for parameter in affine))
        return jax.vmap(_with_affine(layer, affine))(x), memory

    return Layer((), apply, apply)


def _with_affine(layer: Any, affine: Affine) -> Any:
    return eqx.tree_at(
        lambda layer: (layer.weight, layer.bias),
        layer,
        affine,
        is_leaf=lambda leaf: leaf is None,
    )
