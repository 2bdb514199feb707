"""Defines three small networks for MNIST, with a place for any normalisation layer."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

# Makes the normalisation layer for so many channels; the identity where there is none.
MakeNorm = Callable[[int], eqx.Module]

# Log-probabilities of the ten digits, the output of the (last) normalisation layer, state.
Output = tuple[Float[Array, "10"], Float[Array, "..."], eqx.nn.State]


def normalised(norm: eqx.Module, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
    # As the script of the issue has it; `eqx_norm.BatchNorm` is an `eqx.nn.BatchNorm`.
    return norm(x, state) if isinstance(norm, eqx.nn.BatchNorm) else (x, state)


class Perceptron(eqx.Module):
    """Is linear, norm, ReLU, linear: what happens to an image happens to the norm's input.

    No bias, no pooling and no other normalisation lies between the two, so a batch scaled by
    1e3 has 1e6 times the variance in every channel. And it trains in a millisecond a step.
    """

    linear1: eqx.nn.Linear
    norm: eqx.Module
    linear2: eqx.nn.Linear

    def __init__(self, make_norm: MakeNorm, key: PRNGKeyArray):
        keys = jax.random.split(key)
        self.linear1 = eqx.nn.Linear(28 * 28, 64, use_bias=False, key=keys[0])
        self.norm = make_norm(64)
        self.linear2 = eqx.nn.Linear(64, 10, key=keys[1])

    def __call__(self, x: Float[Array, "1 28 28"], state: eqx.nn.State) -> Output:
        # Black is 0 and stays 0. As -1, the pixels that are black in every image would have
        # gradients of rounding errors alone, which Adam scales up to whole steps.
        ink = (jnp.ravel(x) + 1) / 2
        normed, state = normalised(self.norm, self.linear1(ink), state)
        return jax.nn.log_softmax(self.linear2(jax.nn.relu(normed))), normed, state


class Small(eqx.Module):
    """Is the network of https://github.com/patrick-kidger/equinox/issues/659.

    It is Equinox's tutorial CNN with one normalisation layer, after the first linear layer.
    """

    conv: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    linear1: eqx.nn.Linear
    norm: eqx.Module
    linear2: eqx.nn.Linear
    linear3: eqx.nn.Linear

    def __init__(self, make_norm: MakeNorm, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.conv = eqx.nn.Conv2d(1, 3, kernel_size=4, key=keys[0])
        self.pool = eqx.nn.MaxPool2d(kernel_size=2)
        self.linear1 = eqx.nn.Linear(1728, 512, key=keys[1])
        self.norm = make_norm(512)
        self.linear2 = eqx.nn.Linear(512, 64, key=keys[2])
        self.linear3 = eqx.nn.Linear(64, 10, key=keys[3])

    def __call__(self, x: Float[Array, "1 28 28"], state: eqx.nn.State) -> Output:
        x = jax.nn.relu(self.pool(self.conv(x)))
        x = self.linear1(jnp.ravel(x))
        normed, state = normalised(self.norm, x, state)
        x = jax.nn.relu(self.linear2(jax.nn.relu(normed)))
        return jax.nn.log_softmax(self.linear3(x)), normed, state


class Large(eqx.Module):
    """Has four convolutions, each normalised: instability can build up over the depth."""

    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.Module]
    linear: eqx.nn.Linear

    def __init__(self, make_norm: MakeNorm, key: PRNGKeyArray):
        keys = jax.random.split(key, 5)
        layers = zip((1, 16, 32, 64), (16, 32, 64, 64), (1, 2, 2, 1), keys[:4], strict=True)
        self.convs = [
            eqx.nn.Conv2d(inputs, outputs, 3, stride, padding=1, key=key)
            for inputs, outputs, stride, key in layers
        ]
        self.norms = [make_norm(conv.out_channels) for conv in self.convs]
        self.linear = eqx.nn.Linear(64, 10, key=keys[4])

    def __call__(self, x: Float[Array, "1 28 28"], state: eqx.nn.State) -> Output:
        normed = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            normed, state = normalised(norm, conv(x), state)
            x = jax.nn.relu(normed)
        x = x.mean(axis=(1, 2))
        return jax.nn.log_softmax(self.linear(x)), normed, state


NETWORKS = {"perceptron": Perceptron, "small": Small, "large": Large}
