"""Builds networks as users of Equinox do, with either batch norm, to be compiled.

The norm is all that differs, as where an import is changed: each ReLU is a layer of its own.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from eqx_norm import BatchNorm
from experiments.lab.exact import EPS
from experiments.lab.passes import MOMENTUM
from experiments.lab.peers import AXIS, names

from .cases import Shape

MakeNorm = Callable[[int], eqx.Module]
Network = Callable[[MakeNorm], eqx.nn.Sequential]

# Channels, blocks and stride of the stages.
RESNET_18 = ((64, 2, 1), (128, 2, 2), (256, 2, 2), (512, 2, 2))
# As published, but one block a stage: a network of 17 compiles for half a minute.
MOBILENET_V2 = ((16, 1), (24, 1), (32, 2), (64, 2), (96, 1), (160, 2), (320, 1))


class Residual(eqx.nn.StatefulLayer):
    """Adds what a branch gives to its input, or to what a shortcut makes of that."""

    branch: eqx.nn.Sequential
    shortcut: eqx.nn.Sequential

    def __init__(self, branch: Sequence[Any], shortcut: Sequence[Any] = ()) -> None:
        self.branch, self.shortcut = (eqx.nn.Sequential(way) for way in (branch, shortcut))

    def __call__(
        self, x: Array, state: eqx.nn.State, *, key: Any = None
    ) -> tuple[Array, eqx.nn.State]:
        y, state = self.branch(x, state)
        x, state = self.shortcut(x, state)
        return x + y, state


def resnet_18(norm: MakeNorm) -> eqx.nn.Sequential:
    """Returns the network with a stem for small images: 20 norms, of 4 shapes."""
    channels = 64
    layers: list[Any] = [_conv(3, channels), norm(channels), _relu()]
    for width, blocks, first in RESNET_18:
        for stride in (first, *[1] * (blocks - 1)):
            branch = [_conv(channels, width, 3, stride), norm(width), _relu()]
            branch += [_conv(width, width), norm(width)]
            same = width == channels
            shortcut = [] if same else [_conv(channels, width, 1, stride), norm(width)]
            layers += [Residual(branch, shortcut), _relu()]
            channels = width
    return _classifier(layers, channels)


def mobilenet_v2(norm: MakeNorm) -> eqx.nn.Sequential:
    """Returns inverted bottlenecks, and a stem for small images: 22 norms."""
    channels = 32
    layers: list[Any] = [_conv(3, channels), norm(channels), _relu()]
    for width, stride in MOBILENET_V2:
        wide = channels if width == 16 else 6 * channels
        if wide > channels:
            layers += [_conv(channels, wide, 1), norm(wide), _relu()]
        layers += [_conv(wide, wide, 3, stride, groups=wide), norm(wide), _relu()]
        layers += [_conv(wide, width, 1), norm(width)]
        channels = width
    return _classifier([*layers, _conv(channels, 1280, 1), norm(1280), _relu()], 1280)


def stack(norm: MakeNorm) -> eqx.nn.Sequential:
    blocks: list[tuple[Any, ...]] = [(_linear(64, 64), norm(64), _relu()) for _ in range(50)]
    return eqx.nn.Sequential([layer for block in blocks for layer in block])


def pre_activation(norm: MakeNorm, *, channels: int, blocks: int) -> eqx.nn.Sequential:
    """Returns so many blocks x + convolution(ReLU(norm(x)))."""
    conv = functools.partial(_conv, channels, channels)
    made = [Residual([norm(channels), _relu(), conv()]) for _ in range(blocks)]
    return eqx.nn.Sequential(made)


# By name: what makes it, and the shape of its x.
NETWORKS: dict[str, tuple[Network, Shape]] = {
    "ResNet-18": (resnet_18, (2, 3, 32, 32)),
    "MobileNetV2": (mobilenet_v2, (2, 3, 32, 32)),
    "50 x (linear, norm, ReLU)": (stack, (32, 64)),
}


def norm_of(name: str) -> MakeNorm:
    """Returns what makes the batch norm of that name: this package's or Equinox's."""
    how: dict[str, Any] = {"axis_name": AXIS, "momentum": MOMENTUM, "eps": EPS}
    if names.package(name) == "eqx_norm":
        return functools.partial(BatchNorm, approach="batch", **how)
    mode = "batch" if name == names.EQUINOX_BATCH else "ema"
    return functools.partial(eqx.nn.BatchNorm, mode=mode, **how)


def training_step(
    network: Network, name: str, shape: Shape
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a fresh function, forward and backward, and its arguments as shapes.

    Its gradients are those of all parameters and of x.
    """
    make = eqx.nn.make_with_state(network)
    model, state = eqx.filter_eval_shape(make, norm_of(name))
    parameters, static = eqx.partition(model, lambda v: isinstance(v, jax.ShapeDtypeStruct))

    def forward_and_backward(parameters: Any, state: eqx.nn.State, x: Array) -> Any:
        def loss(parameters: Any, x: Array) -> tuple[Array, Any]:
            layers = eqx.combine(parameters, static)
            mapped = jax.vmap(layers, axis_name=AXIS, in_axes=(0, None), out_axes=(0, None))
            y, after = mapped(x, state)
            return jnp.sum(y * y), after

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)

    return forward_and_backward, (parameters, state, jax.ShapeDtypeStruct(shape, jnp.float32))


def _key() -> Array:
    return jax.random.key(0)  # of weights whose values nobody looks at


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> Any:
    sizes: dict[str, Any] = {"stride": stride, "padding": size // 2, "groups": groups}
    return eqx.nn.Conv2d(inputs, outputs, size, use_bias=False, key=_key(), **sizes)


def _linear(inputs: int, outputs: int) -> Any:
    return eqx.nn.Linear(inputs, outputs, key=_key())


def _relu() -> Any:
    return eqx.nn.Lambda(jax.nn.relu)


def _classifier(layers: Sequence[Any], channels: int) -> eqx.nn.Sequential:
    mean = eqx.nn.Lambda(lambda x: x.mean((1, 2)))
    return eqx.nn.Sequential([*layers, mean, _linear(channels, 10)])
