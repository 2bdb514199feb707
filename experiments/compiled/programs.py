"""The programs that are compiled: a norm and its activation, alone and between convolutions.

Each is one of the layers of `lab.peers`, with float32 parameters and an output of the dtype of
x, state update included.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax

from experiments.lab import peers
from experiments.lab.peers import names, ours

RELU_AFTER = f"{names.OURS_XLA}, ReLU after"
NO_NORM = "no norm"
FORWARD, BOTH, APART = "forward", "forward + backward", "forward, then backward"
DIRECTIONS = (FORWARD, BOTH, APART)
BATCH_NORM, BETWEEN = "BatchNorm + ReLU", "conv, BatchNorm + ReLU, conv"
LAYER_NORM, LAYER_NORM_GELU = "LayerNorm", "LayerNorm + GELU"

# Parameters and x to y and the state after it.
Apply = Callable[[Any, Array], Any]


class Case(NamedTuple):
    """A program for one device; `implementation` is one of `names`, or of those above."""

    device: str
    program: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    implementation: str

    @property
    def x(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def program(case: Case) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Returns a function to compile, and what describes its arguments."""
    apply, parameters = _applied(case)
    if case.direction == FORWARD:
        return apply, (parameters, case.x)
    return functools.partial(_both, apply, case.direction == APART), (
        parameters,
        case.x,
        case.x,
    )


def _both(apply: Apply, apart: bool, parameters: Any, x: Array, dy: Array) -> Any:
    """Returns y, the new state, and the gradients of parameters and x."""
    y, pull_back, state = jax.vjp(apply, parameters, x, has_aux=True)
    if apart:  # dy is not there before y is
        y, dy = lax.optimization_barrier((y, dy))
    return y, state, pull_back(dy)


def _applied(case: Case) -> tuple[Apply, Any]:
    """Returns a layer with its activation as a function, and its parameters."""
    if case.program == LAYER_NORM:
        return _layer_norm(case, None), (None, None)
    if case.program == LAYER_NORM_GELU:
        return _layer_norm(case, jax.nn.gelu), _vectors(case.shape[1:])
    if case.program == BATCH_NORM:
        return _batch_norm(case), _vectors(case.shape[1:2])
    channels, dtype = case.shape[1], jnp.dtype(case.dtype)
    make = functools.partial(eqx.nn.Conv2d, channels, channels, 3, padding=1, dtype=dtype)
    convolution = eqx.filter_eval_shape(make, key=jax.random.key(0))
    return _between(case), (convolution, _vectors((channels,)), convolution)


def _vectors(shape: tuple[int, ...]) -> Any:
    return (jax.ShapeDtypeStruct(shape, "float32"),) * 2


def _layer_norm(case: Case, activation: Any) -> Apply:
    settings = peers.LayerNorm(case.shape[1:], 1e-5)
    layer = ours.layer_norm(case.implementation, settings, activation=activation)
    return lambda affine, x: layer.train(affine, layer.memory, x)


def _batch_norm(case: Case) -> Apply:
    settings = peers.BatchNorm(case.shape[1], 0.99, 1e-5, 1, True)
    name = case.implementation
    if name == NO_NORM:
        return lambda affine, x: (jax.nn.relu(x), ())
    if name in (names.OURS_XLA, names.OURS_TRITON, names.OURS_MOSAIC):
        layer = ours.batch_norm_and_relu(name, settings)
        return lambda affine, x: layer.train(affine, layer.memory, x)
    if name == RELU_AFTER:
        layer = ours.batch_norm(names.OURS_XLA, settings)
    else:
        layer = peers.batch_norm(name, settings.channels, momentum=0.99, eps=1e-5)

    def apply(affine: Any, x: Array) -> Any:
        y, state = layer.train(affine, layer.memory, x)
        return jax.nn.relu(y).astype(x.dtype), state

    return apply


def _between(case: Case) -> Apply:
    norm = _batch_norm(case)

    def apply(parameters: Any, x: Array) -> Any:
        before, affine, after = parameters
        y, state = norm(affine, jax.vmap(before)(x))
        return jax.vmap(after)(y), state

    return apply
