"""Defines networks for MNIST and larger ones, and the step that trains and is recorded."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from numpy.typing import NDArray

AXIS = "batch"  # over which the images of a batch are mapped
BATCH_SIZE = 64  # the issue's
OPTIMISER = optax.adam(3e-3)  # the small network reaches 92% in 100 steps

# Makes a normalisation layer for a number of channels.
MakeNorm = Callable[[int], Any]
# Log-probabilities of the ten digits, the output of the last norm layer, and the state.
Output = tuple[Float[Array, "10"], Float[Array, "..."], eqx.nn.State]


class NoNorm(eqx.Module):
    def __call__(self, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        return x, state


class Small(eqx.Module):
    """Equinox's tutorial CNN with a norm after the first linear layer, as in issue #659."""

    conv: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    linear1: eqx.nn.Linear
    norm: Any
    linear2: eqx.nn.Linear
    linear3: eqx.nn.Linear

    def __init__(self, make_norm: MakeNorm, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.conv = eqx.nn.Conv2d(1, 3, kernel_size=4, key=keys[0])
        self.pool = eqx.nn.MaxPool2d(kernel_size=2)  # its stride is 1
        self.linear1 = eqx.nn.Linear(3 * 24 * 24, 512, key=keys[1])
        self.norm = make_norm(512)
        self.linear2 = eqx.nn.Linear(512, 64, key=keys[2])
        self.linear3 = eqx.nn.Linear(64, 10, key=keys[3])

    def __call__(self, image: Float[Array, "1 28 28"], state: eqx.nn.State) -> Output:
        x = jax.nn.relu(self.pool(self.conv(image)))  # [3, 24, 24]
        normed, state = self.norm(self.linear1(jnp.ravel(x)), state)
        x = jax.nn.relu(self.linear2(jax.nn.relu(normed)))
        return jax.nn.log_softmax(self.linear3(x)), normed, state


class Large(eqx.Module):
    """Has four convolutions, each normalised, so instability can grow with the depth."""

    convs: list[eqx.nn.Conv2d]
    norms: list[Any]
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

    def __call__(self, image: Float[Array, "1 28 28"], state: eqx.nn.State) -> Output:
        x = normed = image
        for conv, norm in zip(self.convs, self.norms, strict=True):
            normed, state = norm(conv(x), state)
            x = jax.nn.relu(normed)
        return jax.nn.log_softmax(self.linear(x.mean(axis=(1, 2)))), normed, state


NETWORKS: dict[str, Any] = {"small": Small, "large": Large}


def batches(images: int, steps: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yields the indices of each batch: each epoch in a new order, whole batches only."""
    random = np.random.RandomState(seed)
    epochs = (random.permutation(images) for _ in range(steps))
    starts = range(0, images - BATCH_SIZE + 1, BATCH_SIZE)
    chosen = (order[i : i + BATCH_SIZE] for order in epochs for i in starts)
    return itertools.islice(chosen, steps)


def forward(model: Any, state: eqx.nn.State, images: Float[Array, "n 1 28 28"]) -> Any:
    """Returns log-probabilities [n, 10], the output of the last norm, and the new state."""
    mapped = jax.vmap(model, axis_name=AXIS, in_axes=(0, None), out_axes=(0, 0, None))
    return mapped(images, state)


def loss_of(model: Any, state: eqx.nn.State, images: Array, labels: Int[Array, " n"]) -> Any:
    log_probabilities, normed, state = forward(model, state, images)
    of_labels = jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)  # [n, 1]
    return -of_labels.mean(), (log_probabilities, normed, state)


# One compiled step, called from Python: inside a lax.scan XLA:CPU computes convolutions on one
# core, 12 times as slow in the large network. Seeds run one by one: as an ensemble under an
# outer vmap a step takes 1.6 (small) and 4 (large) times as long per seed.
@eqx.filter_jit
def train_step(
    model: Any, state: eqx.nn.State, memory: Any, images: Array, labels: Array
) -> tuple[Any, eqx.nn.State, Any, dict[str, Array]]:
    """Returns model, state and optimiser state after a step, and a record of it.

    The record includes the norm of each parameter's gradient, as "gradient.conv.weight".
    """
    loss_and_gradient = eqx.filter_value_and_grad(loss_of, has_aux=True)
    (loss, (output, normed, state)), gradient = loss_and_gradient(model, state, images, labels)
    updates, memory = OPTIMISER.update(gradient, memory)
    norms = {
        "gradient" + jax.tree_util.keystr(path): jnp.linalg.norm(leaf.ravel())
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient)
    }
    recorded = {
        "loss": loss,
        "training_accuracy": (output.argmax(axis=1) == labels).mean(),
        "largest_gradient_norm": jnp.stack(list(norms.values())).max(),
        "output_mean": normed.mean(),
        "output_std": normed.std(),
        **norms,
    }
    return eqx.apply_updates(model, updates), state, memory, recorded


@eqx.filter_jit
def accuracy_of(model: Any, state: eqx.nn.State, images: Array, labels: Array) -> Array:
    """Returns the accuracy in inference mode."""
    log_probabilities, _, _ = forward(eqx.nn.inference_mode(model), state, images)
    return (log_probabilities.argmax(axis=1) == labels).mean()


class Block(eqx.nn.StatefulLayer):
    """Is a residual block, whose shortcut may have a convolution."""

    main: eqx.nn.Sequential
    shortcut: eqx.nn.Sequential

    def __call__(
        self, x: Array, state: eqx.nn.State, *, key: Any = None
    ) -> tuple[Array, eqx.nn.State]:
        y, state = self.main(x, state)
        x, state = self.shortcut(x, state)
        return jax.nn.relu(x + y), state


def resnet_50(make_norm: MakeNorm, dtype: Any = jnp.float32) -> eqx.nn.Sequential:
    """Returns the network of He, Zhang, Ren and Sun, https://arxiv.org/abs/1512.03385."""
    key, relu = jax.random.key(0), eqx.nn.Lambda(jax.nn.relu)

    def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> list[Any]:
        how: Any = {"padding": size // 2, "use_bias": False, "dtype": dtype, "key": key}
        return [eqx.nn.Conv2d(inputs, outputs, size, stride, **how), make_norm(outputs)]

    layers, inputs = [*conv(3, 64, 7, 2), relu, eqx.nn.MaxPool2d(3, 2, padding=1)], 64
    for width, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for stride in (first, *[1] * (blocks - 1)):
            main = [*conv(inputs, width, 1), relu, *conv(width, width, 3, stride), relu]
            main += conv(width, 4 * width, 1)
            shortcut = [] if inputs == 4 * width else conv(inputs, 4 * width, 1, stride)
            layers.append(Block(*map(eqx.nn.Sequential, (main, shortcut))))
            inputs = 4 * width
    layers.append(eqx.nn.Lambda(lambda x: x.mean((1, 2))))
    return eqx.nn.Sequential([*layers, eqx.nn.Linear(inputs, 1000, dtype=dtype, key=key)])


def perceptron(make_norm: MakeNorm) -> eqx.nn.Sequential:
    """Returns 50 blocks of linear layer, norm and ReLU, with 64 values."""
    linear = functools.partial(eqx.nn.Linear, 64, 64, key=jax.random.key(0))
    layers = [[linear(), make_norm(64), eqx.nn.Lambda(jax.nn.relu)] for _ in range(50)]
    return eqx.nn.Sequential([layer for several in layers for layer in several])


def gradient_step(network: Callable[..., Any], norm: Any, shape: tuple[int, ...]) -> Any:
    """Returns a new function, the forward and backward pass of a network, and its arguments."""
    make_norm = functools.partial(norm, axis_name=AXIS)
    model, state = eqx.nn.make_with_state(network)(make_norm)
    parameters, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(parameters: Any, x: Array, state: eqx.nn.State) -> Any:
        model, axes = eqx.combine(parameters, static), (0, None)
        y, after = jax.vmap(model, axes, axes, axis_name=AXIS)(x, state)
        return jnp.sum(y * y), after

    x = jax.random.normal(jax.random.key(0), shape)
    return jax.value_and_grad(loss, (0, 1), has_aux=True), (parameters, x, state)
