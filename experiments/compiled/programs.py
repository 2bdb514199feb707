"""Makes the programs: a norm and its activation, alone and between convolutions.

Each is one of the layers of `lab.peers`, with float32 parameters and an output of the dtype of
x, state update included.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax import Array

from experiments.lab import peers
from experiments.lab.exact import EPS
from experiments.lab.passes import BOTH, FORWARD, batch_norm, function
from experiments.lab.peers import Layer, names

RELU_AFTER = f"{names.OURS_XLA}, ReLU after"
APART = "forward, then backward"
DIRECTIONS = (FORWARD, BOTH, APART)
BATCH_NORM, BETWEEN = "BatchNorm + ReLU", "conv, BatchNorm + ReLU, conv"
LAYER_NORM, LAYER_NORM_GELU = "LayerNorm", "LayerNorm + GELU"


class Case(NamedTuple):
    """Names a program for a device; `implementation`: a peer, `NO_NORM` or `RELU_AFTER`."""

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
    made, parameters = _layer(case)
    run = function(made, case.direction, apart=case.direction == APART)
    arrays = [case.x] if case.direction == FORWARD else [case.x, case.x]

    def compiled(parameters: Any, *arrays: Array) -> Any:
        return run(parameters, made.memory, *arrays)

    return compiled, (parameters, *arrays)


def _layer(case: Case) -> tuple[Layer, Any]:
    """Returns a layer with its activation, and what describes its parameters."""
    if case.program == LAYER_NORM:
        return _layer_norm(case, None), (None, None)
    if case.program == LAYER_NORM_GELU:
        return _layer_norm(case, jax.nn.gelu), _vectors(case.shape[1:])
    channels, vectors = case.shape[1], _vectors(case.shape[1:2])
    if case.implementation == RELU_AFTER:
        norm = _activated(batch_norm(names.OURS_XLA, channels, relu=False))
    else:
        norm = batch_norm(case.implementation, channels)
    if case.program == BATCH_NORM:
        return norm, vectors
    convolution = eqx.filter_eval_shape(
        eqx.nn.Conv2d, channels, channels, 3, padding=1, dtype=case.dtype, key=jax.random.key(0)
    )

    def between(parameters: Any, memory: Any, x: Array) -> Any:
        before, affine, after = parameters
        y, memory = norm.train(affine, memory, jax.vmap(before)(x))
        return jax.vmap(after)(y), memory

    return norm._replace(train=between), (convolution, vectors, convolution)


def _layer_norm(case: Case, activation: Any) -> Layer:
    return peers.layer_norm(case.implementation, case.shape[1:], eps=EPS, activation=activation)


def _activated(norm: Layer) -> Layer:
    def train(affine: Any, memory: Any, x: Array) -> tuple[Array, Any]:
        y, memory = norm.train(affine, memory, x)
        return jax.nn.relu(y), memory

    return norm._replace(train=train)


def _vectors(shape: tuple[int, ...]) -> Any:
    return (jax.ShapeDtypeStruct(shape, "float32"),) * 2
