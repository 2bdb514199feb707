"""What is timed of a contestant of the benchmark: forward, and forward and backward."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from .benchmark_layers import (
    BOTH,
    DTYPES,
    JAX_LAYERS,
    PASSES,
    Apply,
    Numbers,
    Outputs,
    Parameters,
    Pass,
    Program,
    State,
)


def numbers(shape: Sequence[int], seed: int = 0) -> Numbers:
    rng = np.random.default_rng(seed)

    def normal(*size: int) -> NDArray[np.float32]:
        return rng.standard_normal(size, dtype=np.float32)

    channels = shape[1]
    return Numbers(
        0.3 + normal(*shape), normal(*shape), 1 + 0.1 * normal(channels), 0.1 * normal(channels)
    )


def forward(apply: Apply) -> Callable[..., Any]:
    """A fresh function, so that `jax.jit` compiles it anew."""

    def forward(parameters: Parameters, state: State, x: Array) -> Any:
        return apply(parameters, state, x)

    return forward


def forward_and_backward(apply: Apply) -> Callable[..., Any]:
    """As `forward`, and the gradients in x and in every weight and bias for a given dy."""

    def forward_and_backward(parameters: Parameters, state: State, x: Array, dy: Array) -> Any:
        def of(parameters: Parameters, x: Array) -> tuple[Array, State]:
            return apply(parameters, state, x)

        y, pull, new = jax.vjp(of, parameters, x, has_aux=True)
        return y, new, pull(dy)

    return forward_and_backward


class Case(NamedTuple):
    """A contestant at work on some numbers: the functions and what they are called with."""

    functions: dict[Pass, Callable[[], Callable[..., Any]]]
    arguments: dict[Pass, tuple[Any, ...]]
    channels_last: bool

    def program(self, name: Pass) -> Program:
        jitted, arguments = jax.jit(self.functions[name]()), self.arguments[name]
        return Program(lambda: jitted(*arguments))

    def programs(self) -> dict[Pass, Program]:
        return {name: self.program(name) for name in PASSES}

    def outputs(self, result: Any) -> Outputs:
        y, _, ((affine,), dx) = result
        dweight, dbias = affine
        arrays = (np.asarray(a, np.float32) for a in (y, dx, dweight, dbias))
        y, dx, dweight, dbias = arrays
        if self.channels_last:
            y, dx = np.moveaxis(y, -1, 1), np.moveaxis(dx, -1, 1)
        return Outputs(y, dx, dweight, dbias)


def case(name: str, given: Numbers, dtype: str, depth: int = 1) -> Case:
    peer = JAX_LAYERS[name]
    apply, state = peer.make(given.x.shape[1], DTYPES[dtype], depth)

    def placed(a: NDArray[np.float32]) -> Array:
        moved = np.ascontiguousarray(np.moveaxis(a, 1, -1)) if peer.channels_last else a
        return jax.device_put(jnp.asarray(moved).astype(DTYPES[dtype]))

    x, dy = placed(given.x), placed(given.dy)
    parameters = ((jnp.asarray(given.weight), jnp.asarray(given.bias)),) * depth
    return Case(
        {
            "forward": lambda: forward(apply),
            BOTH: lambda: forward_and_backward(apply),
        },
        {
            "forward": (parameters, state, x),
            BOTH: (parameters, state, x, dy),
        },
        peer.channels_last,
    )
