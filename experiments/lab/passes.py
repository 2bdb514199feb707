"""Makes functions to time and to compile: a layer forward, and with its backward pass."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from . import peers
from .exact import EPS
from .peers import Apply, Layer, names

MOMENTUM = 0.99
FORWARD, BOTH, INFERENCE = "forward", "forward + backward", "inference"
NO_NORM = "no norm"


def batch_norm(
    name: str,
    channels: int,
    *,
    channel_axis: int = 1,
    activation: Callable[[Array], Array] | None = jax.nn.relu,
) -> Layer:
    """Returns a batch norm with an activation, or none; its output has the dtype of x."""
    if name == NO_NORM:
        unchanged: Any = lambda affine, memory, x: (x, memory)  # noqa: E731
        made = Layer((), unchanged, unchanged)
    else:
        # This layer has an activation of its own.
        own = names.package(name) == "eqx_norm" and name != names.OURS_SEPARATE
        how: dict[str, Any] = {"activation": activation} if own else {}
        made = peers.batch_norm(
            name, channels, momentum=MOMENTUM, eps=EPS, channel_axis=channel_axis, **how
        )
        if own:
            return made

    def followed(apply: Apply) -> Apply:
        def applied(affine: Any, memory: Any, x: Array) -> tuple[Array, Any]:
            y, memory = apply(affine, memory, x)
            # Equinox's layer returns f32 for bf16: in a network it has to be cast.
            return (activation(y) if activation else y).astype(x.dtype), memory

        return applied

    return made._replace(train=followed(made.train), evaluate=followed(made.evaluate))


def function(made: Layer, pass_: str, *, apart: bool = False) -> Callable[..., Any]:
    """Returns a fresh function, so that `jax.jit` compiles it anew.

    It is of (parameters, memory, x) to y and the memory; or of these and dy to those, and the
    gradients of parameters and x. `apart`: dy is not there before y, as in a network. In
    inference it gives y alone.
    """

    def forward(parameters: Any, memory: Any, x: Array) -> Any:
        return made.train(parameters, memory, x)

    def inference(parameters: Any, memory: Any, x: Array) -> Array:
        return made.evaluate(parameters, memory, x)[0]

    def forward_and_backward(parameters: Any, memory: Any, x: Array, dy: Array) -> Any:
        def train(parameters: Any, x: Array) -> tuple[Array, Any]:
            return made.train(parameters, memory, x)

        y, pull_back, memory = jax.vjp(train, parameters, x, has_aux=True)
        if apart:
            y, dy = jax.lax.optimization_barrier((y, dy))
        return y, memory, pull_back(dy.astype(y.dtype))

    return {FORWARD: forward, INFERENCE: inference}.get(pass_, forward_and_backward)
