"""The programs that are compiled for a GPU: norm and ReLU, alone and between convolutions."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array

from eqx_norm import BatchNorm

AXIS = "batch"

# From layer, state and x to y and the new state.
Apply = Callable[[eqx.Module, eqx.nn.State, Array], tuple[Array, eqx.nn.State]]
Made = tuple[eqx.Module, eqx.nn.State]


class Implementation(NamedTuple):
    """Makes layer and state for so many channels, and applies them with ReLU.

    The parameters are float32, as they are unless one says otherwise, also for an input in
    bfloat16; the output has the dtype of the input.
    """

    make: Callable[[int], Made]
    apply: Apply


def _over_batch(layer: Any, state: eqx.nn.State, x: Array) -> tuple[Array, eqx.nn.State]:
    mapped = jax.vmap(layer, axis_name=AXIS, in_axes=(0, None), out_axes=(0, None))
    return mapped(x, state)


def _then_relu(layer: Any, state: eqx.nn.State, x: Array) -> tuple[Array, eqx.nn.State]:
    y, state = _over_batch(layer, state, x)
    return jax.nn.relu(y).astype(x.dtype), state


def _ours(channels: int, **keywords: Any) -> Made:
    make = eqx.nn.make_with_state(BatchNorm)
    return make(channels, AXIS, approach="batch", **keywords)


def _ours_with_relu(implementation: Any) -> Callable[[int], Made]:
    how: Any = {"activation": jax.nn.relu, "implementation": implementation}
    return lambda channels: _ours(channels, **how)


def _equinox(mode: Any) -> Callable[[int], Made]:
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    return lambda channels: make(channels, AXIS, mode=mode)


OURS, KERNEL = "eqx_norm", "eqx_norm, kernel"
IMPLEMENTATIONS = {
    OURS: Implementation(_ours_with_relu("xla"), _over_batch),
    KERNEL: Implementation(_ours_with_relu("pallas_triton"), _over_batch),
    "eqx_norm, relu after": Implementation(
        functools.partial(_ours, implementation="xla"), _then_relu
    ),
    "equinox, batch": Implementation(_equinox("batch"), _then_relu),
    "equinox, ema": Implementation(_equinox("ema"), _then_relu),
}
NO_NORM = "no norm"


# Programs of (layer, state, x, dy).
Program = Callable[[Any, eqx.nn.State, Array, Array], Any]


def forward(apply: Apply) -> Program:
    """To y and the new state."""
    return lambda layer, state, x, dy: apply(layer, state, x)


def both(apply: Apply, *, apart: bool = False) -> Program:
    """To y, the new state, and the gradients of parameters and x."""

    def program(layer: Any, state: eqx.nn.State, x: Array, dy: Array) -> Any:
        parameters, rest = eqx.partition(layer, eqx.is_inexact_array)

        def f(parameters: Any, x: Array) -> tuple[Array, eqx.nn.State]:
            return apply(eqx.combine(parameters, rest), state, x)

        y, transposed, state = jax.vjp(f, parameters, x, has_aux=True)
        if apart:  # dy is not there before y is
            y, dy = jax.lax.optimization_barrier((y, dy))
        return y, state, transposed(dy)

    return program


BOTH = "forward + backward"
DIRECTIONS: dict[str, Callable[[Apply], Program]] = {
    "forward": forward,
    BOTH: both,
    "forward, then backward": functools.partial(both, apart=True),
}


class Between(eqx.Module):
    """A convolution, the layer or only ReLU, a convolution."""

    before: eqx.nn.Conv2d
    norm: eqx.Module | None
    after: eqx.nn.Conv2d


def between(name: str, channels: int, dtype: Any) -> tuple[Between, eqx.nn.State, Apply]:
    keys = jax.random.split(jax.random.key(0), 2)
    before, after = (
        eqx.nn.Conv2d(channels, channels, 3, padding=1, key=key, dtype=dtype) for key in keys
    )
    if name == NO_NORM:
        norm, state = None, eqx.nn.State(None)
    else:
        norm, state = IMPLEMENTATIONS[name].make(channels)

    def apply(layer: Any, state: eqx.nn.State, x: Array) -> tuple[Array, eqx.nn.State]:
        x = jax.vmap(layer.before)(x)
        if name == NO_NORM:
            x = jax.nn.relu(x)
        else:
            x, state = IMPLEMENTATIONS[name].apply(layer.norm, state, x)
        return jax.vmap(layer.after)(x), state

    return Between(before, norm, after), state, apply
