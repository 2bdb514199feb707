"""ResNet-18 as torchvision has it, with the same names, in Equinox with this package's norm.

He et al., "Deep Residual Learning for Image Recognition", https://arxiv.org/abs/1512.03385.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from eqx_norm import BatchNorm


def _conv(channels: int, out: int, size: int, stride: int, key: PRNGKeyArray) -> eqx.nn.Conv2d:
    return eqx.nn.Conv2d(channels, out, size, stride, size // 2, use_bias=False, key=key)


def _norm(channels: int) -> BatchNorm:
    """Returns the norm that has PyTorch's defaults."""
    return BatchNorm(channels, "batch", approach="batch", momentum=0.9, unbiased=True)


class BasicBlock(eqx.Module):
    conv1: eqx.nn.Conv2d
    bn1: BatchNorm
    conv2: eqx.nn.Conv2d
    bn2: BatchNorm
    downsample: list[Any] | None

    def __init__(self, channels: int, out: int, stride: int, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.conv1, self.bn1 = _conv(channels, out, 3, stride, keys[0]), _norm(out)
        self.conv2, self.bn2 = _conv(out, out, 3, 1, keys[1]), _norm(out)
        changes = stride != 1 or channels != out
        self.downsample = (
            [_conv(channels, out, 1, stride, keys[2]), _norm(out)] if changes else None
        )

    def __call__(self, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        y, state = self.bn1(self.conv1(x), state)
        y, state = self.bn2(self.conv2(jax.nn.relu(y)), state)
        if self.downsample is not None:
            conv, norm = self.downsample
            x, state = norm(conv(x), state)
        return jax.nn.relu(x + y), state


class ResNet18(eqx.Module):
    conv1: eqx.nn.Conv2d
    bn1: BatchNorm
    layer1: list[BasicBlock]
    layer2: list[BasicBlock]
    layer3: list[BasicBlock]
    layer4: list[BasicBlock]
    fc: eqx.nn.Linear

    def __init__(self, classes: int, key: PRNGKeyArray):
        def two(channels: int, out: int, stride: int, key: PRNGKeyArray) -> list[BasicBlock]:
            first, second = jax.random.split(key)
            return [BasicBlock(channels, out, stride, first), BasicBlock(out, out, 1, second)]

        keys = jax.random.split(key, 6)
        self.conv1, self.bn1 = _conv(3, 64, 7, 2, keys[0]), _norm(64)
        self.layer1 = two(64, 64, 1, keys[1])
        self.layer2 = two(64, 128, 2, keys[2])
        self.layer3 = two(128, 256, 2, keys[3])
        self.layer4 = two(256, 512, 2, keys[4])
        self.fc = eqx.nn.Linear(512, classes, key=keys[5])

    def __call__(self, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        x, state = self.bn1(self.conv1(x), state)
        x = eqx.nn.MaxPool2d(3, 2, 1)(jax.nn.relu(x))
        for block in [*self.layer1, *self.layer2, *self.layer3, *self.layer4]:
            x, state = block(x, state)
        return self.fc(jnp.mean(x, (1, 2))), state
