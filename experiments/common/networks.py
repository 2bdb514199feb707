"""Defines networks to time and compile: for images, of vectors, and a decoder."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .training import AXIS, OPTIMISER, MakeNorm

RELU = eqx.nn.Lambda(jax.nn.relu)


class Block(eqx.nn.StatefulLayer):
    """Applies a residual block, whose shortcut may have a convolution."""

    main: eqx.nn.Sequential
    shortcut: eqx.nn.Sequential

    def __call__(
        self, x: Array, state: eqx.nn.State, *, key: Any = None
    ) -> tuple[Array, eqx.nn.State]:
        y, state = self.main(x, state)
        x, state = self.shortcut(x, state)
        return jax.nn.relu(x + y), state


def _conv(
    make_norm: MakeNorm, inputs: int, outputs: int, size: int, stride: int = 1, **how: Any
) -> list[Any]:
    """Returns a convolution and its norm."""
    how |= {"padding": size // 2, "use_bias": False, "key": jax.random.key(0)}
    return [eqx.nn.Conv2d(inputs, outputs, size, stride, **how), make_norm(outputs)]


def _classifier(layers: list[Any], inputs: int, dtype: Any = jnp.float32) -> eqx.nn.Sequential:
    """Returns the layers, a mean over the positions, and a linear layer."""
    mean = eqx.nn.Lambda(lambda x: x.mean((1, 2)))
    last = eqx.nn.Linear(inputs, 1000, dtype=dtype, key=jax.random.key(0))
    return eqx.nn.Sequential([*layers, mean, last])


def resnet_50(make_norm: MakeNorm, dtype: Any = jnp.float32) -> eqx.nn.Sequential:
    """Returns the network of He, Zhang, Ren and Sun, https://arxiv.org/abs/1512.03385."""
    conv = functools.partial(_conv, make_norm, dtype=dtype)
    layers, inputs = [*conv(3, 64, 7, 2), RELU, eqx.nn.MaxPool2d(3, 2, padding=1)], 64
    for width, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for stride in (first, *[1] * (blocks - 1)):
            main = [*conv(inputs, width, 1), RELU, *conv(width, width, 3, stride), RELU]
            main += conv(width, 4 * width, 1)
            shortcut = [] if inputs == 4 * width else conv(inputs, 4 * width, 1, stride)
            layers.append(Block(*map(eqx.nn.Sequential, (main, shortcut))))
            inputs = 4 * width
    return _classifier(layers, inputs, dtype)


def small_cnn(make_norm: MakeNorm) -> eqx.nn.Sequential:
    """Returns four convolutions of 3 by 3 with norm and ReLU, of 32 to 256 channels."""
    layers: list[Any] = []
    for inputs, outputs in itertools.pairwise((3, 32, 64, 128, 256)):
        layers += [*_conv(make_norm, inputs, outputs, 3, 2), RELU]
    return _classifier(layers, 256)


class Encoder(eqx.nn.StatefulLayer):
    """Applies a transformer block: norm and attention, then norm and two linear layers."""

    norms: list[Any]
    attention: eqx.nn.MultiheadAttention
    layers: eqx.nn.MLP

    def __call__(
        self, x: Array, state: eqx.nn.State, *, key: Any = None
    ) -> tuple[Array, eqx.nn.State]:
        u = jax.vmap(self.norms[0])(x)
        x = x + self.attention(u, u, u)
        return x + jax.vmap(self.layers)(jax.vmap(self.norms[1])(x)), state


def vit(make_norm: MakeNorm) -> eqx.nn.Sequential:
    """Returns the smallest encoder of Touvron and others, https://arxiv.org/abs/2012.12877, on
    patches of 16 by 16 without their positions."""
    width, key = 192, jax.random.key(0)
    tokens = eqx.nn.Lambda(lambda x: x.reshape(width, -1).T)
    layers: list[Any] = [eqx.nn.Conv2d(3, width, 16, 16, key=key), tokens]
    for _ in range(12):
        attention = eqx.nn.MultiheadAttention(3, width, key=key)
        mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=key)
        norms = [make_norm(width), make_norm(width)]
        parts: Any = norms, attention, mlp  # pyright takes the base's `__call__` for a field
        layers.append(Encoder(*parts))
    images = eqx.nn.Lambda(lambda x: x.T[..., None])
    return _classifier([*layers, images], width)


def perceptron(make_norm: MakeNorm, sizes: Sequence[int] = (64,) * 51) -> eqx.nn.Sequential:
    """Returns blocks of linear layer, norm and ReLU: 50, with 64 values."""
    pairs, key = itertools.pairwise(sizes), jax.random.key(0)
    blocks = ([eqx.nn.Linear(m, n, key=key), make_norm(n), RELU] for m, n in pairs)
    return eqx.nn.Sequential([*itertools.chain(*blocks)])


def critic(make_norm: MakeNorm) -> eqx.nn.Sequential:
    """Returns a critic of reinforcement learning: two blocks with 256 values and a linear
    layer, for 17 numbers."""
    last = eqx.nn.Linear(256, 1, key=jax.random.key(0))
    return eqx.nn.Sequential([perceptron(make_norm, (17, 256, 256)), last])


HEADS, WIDTH, BLOCKS = 4, 256, 4  # of the decoder


class DecoderBlock(eqx.Module):
    """Applies a transformer block to one row, which attends to the rows before it."""

    norms: list[Any]
    head_norms: list[Any]  # of queries and keys, or none
    to_heads: eqx.nn.Linear
    from_heads: eqx.nn.Linear
    layers: eqx.nn.MLP

    def __init__(self, make_norm: MakeNorm, *, normalises_heads: bool):
        key, size = jax.random.key(0), WIDTH // HEADS
        self.norms = [make_norm(WIDTH), make_norm(WIDTH)]
        self.head_norms = [make_norm(size), make_norm(size)] if normalises_heads else []
        self.to_heads = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=key)
        self.from_heads = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.layers = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=key)

    def __call__(self, x: Array, cache: Array, place: Array) -> tuple[Array, Array]:
        """Returns the row, and the cache of keys and values, `(2, rows, heads, size)`, with
        those of this row, which is at `place`."""
        q, k, v = self.to_heads(self.norms[0](x)).reshape(3, HEADS, -1)
        if self.head_norms:
            of_queries, of_keys = self.head_norms
            q, k = jax.vmap(of_queries)(q), jax.vmap(of_keys)(k)
        cache = cache.at[:, place].set(jnp.stack([k, v]))
        keys, values = cache
        scores = jnp.einsum("hs,nhs->hn", q, keys) / jnp.sqrt(q.shape[-1])
        is_known = jnp.arange(len(keys)) <= place
        weights = jax.nn.softmax(jnp.where(is_known, scores, -jnp.inf))
        x = x + self.from_heads(jnp.einsum("hn,nhs->hs", weights, values).reshape(-1))
        return x + self.layers(self.norms[1](x)), cache


def decoder(make_norm: MakeNorm, *, normalises_heads: bool = False) -> list[DecoderBlock]:
    """Returns the blocks of a decoder, with a norm of each query and key or not."""
    return [DecoderBlock(make_norm, normalises_heads=normalises_heads) for _ in range(BLOCKS)]


def decoding(
    network: Callable[..., Any], make_norm: MakeNorm, shape: tuple[int, ...]
) -> tuple[Callable[..., Array], tuple[Any, Array]]:
    """Returns a new function, a scan of a decoder over the rows of x, one at a time, and its
    arguments."""
    arrays, static = eqx.partition(network(make_norm), eqx.is_array)
    rows = shape[0]

    def decode(arrays: Any, xs: Array) -> Array:
        blocks = eqx.combine(arrays, static)

        def step(caches: list[Array], row: tuple[Array, Array]) -> tuple[list[Array], Array]:
            place, x = row
            after = []
            for block, cache in zip(blocks, caches, strict=True):
                x, cache = block(x, cache, place)
                after.append(cache)
            return after, x

        caches = [jnp.zeros((2, rows, HEADS, WIDTH // HEADS)) for _ in blocks]
        return jax.lax.scan(step, caches, (jnp.arange(rows), xs))[1]

    return decode, (arrays, jax.random.normal(jax.random.key(0), shape))


def applied(model: Any, state: eqx.nn.State, x: Array) -> tuple[Array, eqx.nn.State]:
    """Returns the model's outputs for a batch, and the new state."""
    return jax.vmap(model, (0, None), (0, None), axis_name=AXIS)(x, state)


def squares(model: Any, state: eqx.nn.State, x: Array) -> tuple[Array, eqx.nn.State]:
    """Returns a loss, the sum of the outputs' squares, and the new state."""
    y, state = applied(model, state, x)
    return jnp.sum(y * y), state


def gradient_step(
    network: Callable[..., Any], make_norm: MakeNorm, shape: tuple[int, ...]
) -> Any:
    """Returns a new function, the forward and backward pass of a network, and its arguments."""
    model, state = eqx.nn.make_with_state(network)(make_norm)
    parameters, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(parameters: Any, x: Array, state: eqx.nn.State) -> Any:
        return squares(eqx.combine(parameters, static), state, x)

    x = jax.random.normal(jax.random.key(0), shape)
    return jax.value_and_grad(loss, (0, 1), has_aux=True), (parameters, x, state)


def uses(network: Callable[..., Any], make_norm: MakeNorm, shape: tuple[int, ...]) -> Any:
    """Returns calls as users make them, in training and inference, by name: functions without
    arguments, which call a function of model and state compiled by `eqx.filter_jit`."""
    model, state = eqx.nn.make_with_state(network)(make_norm)
    memory = OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))
    x = jax.random.normal(jax.random.key(0), shape)
    gradient = eqx.filter_jit(eqx.filter_grad(squares, has_aux=True))

    @eqx.filter_jit
    def train(model: Any, state: eqx.nn.State, memory: Any, x: Array) -> Any:
        gradients, state = eqx.filter_grad(squares, has_aux=True)(model, state, x)
        updates, memory = OPTIMISER.update(gradients, memory)
        return eqx.apply_updates(model, updates), state, memory

    infer, ready = eqx.filter_jit(applied), eqx.nn.inference_mode(model)
    return {
        "gradient": lambda: gradient(model, state, x),
        "gradient and Adam": lambda: train(model, state, memory, x),
        f"inference of {len(x)}": lambda: infer(ready, state, x),
        "inference of 1": lambda: infer(ready, state, x[:1]),
    }
