"""Makes a network's training step, which shows what a layer alone does not.

A kernel is a barrier to what XLA would fuse, and convolutions have a layout of their own. The
network is in the manner of a ResNet-50: the first block of each of its stages, and a stem. With
all four stages there are 17 norms, on arrays of the sizes that a ResNet-50 has. (The first
block's stride stands in for the pooling.)
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from experiments.lab.passes import batch_norm
from experiments.lab.peers import Layer
from experiments.lab.timer import Program

from .cases import DTYPES, Problem, Sizes
from .programs import unit_affine

OPTIMISER = optax.sgd(0.01, momentum=0.9)


class Convolution(NamedTuple):
    """Says what a convolution is, and whether the norm after it has a ReLU."""

    inputs: int
    outputs: int
    size: int
    stride: int
    relu: bool


def convolutions(sizes: Sizes) -> list[Convolution]:
    """Returns the stem, and four convolutions for each block."""
    channels = sizes.stem
    found = [Convolution(3, channels, 7, 2, relu=True)]
    for width in sizes.stages:
        found += [
            Convolution(channels, width, 1, 1, relu=True),
            Convolution(width, width, 3, 2, relu=True),
            Convolution(width, 4 * width, 1, 1, relu=False),
            Convolution(channels, 4 * width, 1, 2, relu=False),  # beside these three
        ]
        channels = 4 * width
    return found


def problem(sizes: Sizes, dtype: str) -> Problem:
    """Returns what the network is given."""
    return Problem((sizes.batch, 3, sizes.image, sizes.image), dtype, "")


@functools.partial(jax.jit, static_argnums=(0, 1))  # array by array it takes far longer
def initial(sizes: Sizes, dtype: str) -> Any:
    """Returns kernels in `dtype`; weights and biases, and the last layer, in float32."""
    made = convolutions(sizes)
    *keys, last = jax.random.split(jax.random.key(0), len(made) + 1)
    normal = jax.nn.initializers.he_normal(in_axis=1, out_axis=0)
    kernels = [
        normal(key, (conv.outputs, conv.inputs, conv.size, conv.size), DTYPES[dtype])
        for conv, key in zip(made, keys, strict=True)
    ]
    head = normal(last, (sizes.classes, made[-1].outputs))
    return kernels, [unit_affine(conv.outputs) for conv in made], head


def logits(
    network: Sequence[tuple[Convolution, Layer]], weights: Any, memories: Any, images: Array
) -> tuple[Array, list[Any]]:
    """Returns logits of images [N, 3, H, W] in float32, and the memories after them."""
    kernels, affines, head = weights
    after: list[Any] = []

    def convolved(x: Array) -> Array:
        """Applies the next convolution and its norm."""
        i = len(after)
        conv, norm = network[i]
        x = jax.lax.conv(x, kernels[i], (conv.stride, conv.stride), "SAME")
        y, memory = norm.train(affines[i], memories[i], x)
        after.append(memory)
        return y

    x = convolved(images)
    while len(after) < len(network):
        y = convolved(convolved(convolved(x)))
        x = jax.nn.relu(y + convolved(x))
    return x.mean((2, 3)).astype(jnp.float32) @ head.T, after


def program(name: str, sizes: Sizes, dtype: str) -> Program:
    """Returns training, each step on the same images, whose call gives the loss.

    It is compiled here, so that several may be at once.
    """
    network = [
        (c, batch_norm(name, c.outputs, activation=jax.nn.relu if c.relu else None))
        for c in convolutions(sizes)
    ]
    keys = jax.random.split(jax.random.key(1))
    images = jax.random.normal(keys[0], problem(sizes, dtype).shape, DTYPES[dtype])
    labels = jax.random.randint(keys[1], (sizes.batch,), 0, sizes.classes)

    @jax.jit
    def step(carried: Any, images: Array, labels: Array) -> Any:
        weights, memories, memory, _ = carried

        def loss(weights: Any) -> Any:
            found, after = logits(network, weights, memories, images)
            entropies = optax.softmax_cross_entropy_with_integer_labels(found, labels)
            return entropies.mean(), after

        (value, memories), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        change, memory = OPTIMISER.update(gradients, memory)
        return optax.apply_updates(weights, change), memories, memory, value

    weights = initial(sizes, dtype)
    memories = [layer.memory for _, layer in network]
    carried = weights, memories, OPTIMISER.init(weights), jnp.zeros(())
    compiled = step.lower(carried, images, labels).compile()

    def call() -> Any:
        nonlocal carried
        carried = compiled(carried, images, labels)
        return carried[-1]

    call()
    if not np.isfinite(call()):  # which has seen the gradients of the first
        raise FloatingPointError("the loss is not finite")
    return Program(call)
