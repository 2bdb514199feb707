"""Makes a network's training step, which shows what a layer alone does not.

A kernel is a barrier to what XLA would fuse, and convolutions have a layout of their own. The
network is in the manner of a ResNet-50: the first block of each of its stages, and a stem. With
all four stages there are 17 norms, on arrays of the sizes that a ResNet-50 has. (The first
block's stride stands in for the pooling.)
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

from experiments.lab.passes import batch_norm
from experiments.lab.peers import Layer
from experiments.lab.timer import Program

from .cases import DTYPES, Shape, Sizes

OPTIMISER = optax.sgd(0.01, momentum=0.9)
BLOCK = 4  # convolutions: of sizes 1, 3 and 1, and one beside them


class Linear(NamedTuple):
    """Holds what the networks have in common: convolutions with a norm each, and a head."""

    convolutions: list[eqx.nn.Conv2d]
    head: eqx.nn.Linear


def images_shape(sizes: Sizes) -> Shape:
    return sizes.batch, 3, sizes.image, sizes.image


@eqx.filter_jit  # as one program: array by array it takes longer than all steps
def initial(sizes: Sizes, dtype: Any) -> Linear:
    """Returns convolutions in `dtype`, and the last layer in float32."""
    # Inputs, outputs, size, stride.
    settings, channels = [(3, sizes.stem, 7, 2)], sizes.stem
    for width in sizes.stages:
        settings += [(channels, width, 1, 1), (width, width, 3, 2), (width, 4 * width, 1, 1)]
        settings += [(channels, 4 * width, 1, 2)]
        channels = 4 * width
    *keys, last = jax.random.split(jax.random.key(0), len(settings) + 1)
    convolutions = [
        eqx.nn.Conv2d(*setting, setting[2] // 2, use_bias=False, dtype=dtype, key=key)
        for setting, key in zip(settings, keys, strict=True)
    ]
    return Linear(convolutions, eqx.nn.Linear(channels, sizes.classes, key=last))


def norms(name: str, linear: Linear) -> list[Layer]:
    """Returns a norm for each convolution, with a ReLU but before and beside a sum."""
    return [
        batch_norm(name, conv.out_channels, relu=i % BLOCK not in (3, 0) or i == 0)
        for i, conv in enumerate(linear.convolutions)
    ]


def logits(
    layers: list[Layer], linear: Linear, affines: Any, memories: Any, images: Array
) -> tuple[Array, list[Any]]:
    """Returns logits of images [N, 3, H, W] in float32, and the memories after them."""
    after: list[Any] = []

    def convolved(x: Array) -> Array:
        """Applies the next convolution and its norm."""
        i = len(after)
        x = jax.vmap(linear.convolutions[i])(x)
        y, memory = layers[i].train(affines[i], memories[i], x)
        after.append(memory)
        return y

    x = convolved(images)
    while len(after) < len(layers):
        y = convolved(convolved(convolved(x)))
        x = jax.nn.relu(y + convolved(x))
    return jax.vmap(linear.head)(x.mean((2, 3)).astype(jnp.float32)), after


def program(name: str, linear: Linear, sizes: Sizes, dtype: str) -> Program:
    """Returns training, each step on the same images, whose call gives the loss.

    It is compiled here, so that several may be at once.
    """
    layers = norms(name, linear)
    keys = jax.random.split(jax.random.key(1))
    images = jax.random.normal(keys[0], images_shape(sizes), DTYPES[dtype])
    labels = jax.random.randint(keys[1], (sizes.batch,), 0, sizes.classes)
    channels = [conv.out_channels for conv in linear.convolutions]
    affines = [(jnp.ones(c), jnp.zeros(c)) for c in channels]
    arrays, static = eqx.partition((linear, affines), eqx.is_inexact_array)

    def step(carried: Any, images: Array, labels: Array) -> Any:
        arrays, memories, memory, _ = carried

        def loss(arrays: Any) -> Any:
            linear, affines = eqx.combine(arrays, static)
            found, after = logits(layers, linear, affines, memories, images)
            entropies = optax.softmax_cross_entropy_with_integer_labels(found, labels)
            return entropies.mean(), after

        (value, memories), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
        change, memory = OPTIMISER.update(gradients, memory)
        return optax.apply_updates(arrays, change), memories, memory, value

    carried = arrays, [made.memory for made in layers], OPTIMISER.init(arrays), jnp.zeros(())
    compiled = jax.jit(step).lower(carried, images, labels).compile()

    def call() -> Any:
        nonlocal carried
        carried = compiled(carried, images, labels)
        return carried[-1]

    return Program(call)
