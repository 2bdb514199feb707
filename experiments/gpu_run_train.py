"""The time of a whole training step with each layer, which a layer alone does not show: a
kernel is a barrier to what XLA would fuse, and convolutions have a layout of their own.

The network is in the manner of a ResNet-50: the first block of each of its four stages, and a
stem: 17 norms, on arrays of the sizes that a ResNet-50 has. (The first block's stride stands in
for the pooling.)
"""

from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from . import gpu_run_timing
from .benchmark_layers import DTYPES
from .gpu_programs import Apply
from .gpu_run_contenders import BATCH_NORMS, MakeBatchNorm
from .gpu_run_job import Sizes
from .gpu_run_rows import TRAIN, Row, timed
from .gpu_run_timing import Taken, interleave

STEP = "training step"
OPTIMISER = optax.sgd(0.01, momentum=0.9)


class ConvNorm(eqx.Module):
    """A convolution and its norm, on a whole batch [N, C, H, W]."""

    conv: eqx.nn.Conv2d
    norm: Any
    apply: Apply = eqx.field(static=True)

    def __call__(self, x: Array, state: Any) -> tuple[Array, Any]:
        return self.apply(self.norm, state, jax.vmap(self.conv)(x))


class Bottleneck(eqx.Module):
    inner: list[ConvNorm]  # of sizes 1, 3 and 1; no ReLU after the last
    beside: ConvNorm

    def __call__(self, x: Array, states: list[Any]) -> tuple[Array, list[Any]]:
        y, new = x, []
        for step, state in zip(self.inner, states, strict=False):
            y, state = step(y, state)
            new.append(state)
        z, state = self.beside(x, states[-1])
        return jax.nn.relu(y + z), [*new, state]


class Network(eqx.Module):
    stem: ConvNorm
    blocks: list[Bottleneck]
    linear: eqx.nn.Linear

    def __call__(self, x: Array, states: list[Any]) -> tuple[Array, list[Any]]:
        """From images [N, 3, H, W] to logits in float32."""
        x, state = self.stem(x, states[0])
        new = [state]
        for block, before in zip(self.blocks, states[1:], strict=True):
            x, after = block(x, before)
            new.append(after)
        return jax.vmap(self.linear)(x.mean((2, 3)).astype(jnp.float32)), new


class Linear(NamedTuple):
    """What all networks have in common."""

    stem: eqx.nn.Conv2d
    blocks: list[tuple[eqx.nn.Conv2d, ...]]
    head: eqx.nn.Linear


@eqx.filter_jit  # as one program: array by array it takes longer than all steps
def initial(sizes: Sizes, dtype: Any) -> Linear:
    """Convolutions in `dtype`, the last layer in float32."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * len(sizes.stages) + 2))

    def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> eqx.nn.Conv2d:
        return eqx.nn.Conv2d(
            inputs,
            outputs,
            size,
            stride,
            padding=size // 2,
            use_bias=False,
            dtype=dtype,
            key=next(keys),
        )

    stem = conv(3, sizes.stem, 7, 2)
    channels, blocks = sizes.stem, []
    for width in sizes.stages:
        inner = conv(channels, width, 1), conv(width, width, 3, 2), conv(width, 4 * width, 1)
        blocks.append((*inner, conv(channels, 4 * width, 1, 2)))
        channels = 4 * width
    return Linear(stem, blocks, eqx.nn.Linear(channels, sizes.classes, key=next(keys)))


def build(make: MakeBatchNorm, linear: Linear) -> tuple[Network, list[Any]]:
    """With a norm after each convolution; and the state of every norm."""

    def step(conv: eqx.nn.Conv2d, *, relu: bool = True) -> tuple[ConvNorm, Any]:
        made = make(conv.out_channels, relu)
        return ConvNorm(conv, made.layer, made.apply), made.state

    stem, state = step(linear.stem)
    blocks, states = [], [state]
    for first, second, third, beside in linear.blocks:
        steps = step(first), step(second), step(third, relu=False), step(beside, relu=False)
        *inner, last = (conv_norm for conv_norm, _ in steps)
        blocks.append(Bottleneck(inner, last))
        states.append([state for _, state in steps])
    return Network(stem, blocks, linear.head), states


def loss(network: Network, states: Any, images: Array, labels: Array) -> tuple[Array, Any]:
    logits, states = network(images, states)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), states


class Training:
    """A network in training, each step on the same images."""

    instances = 1

    def __init__(self, name: str, linear: Linear, images: Array, labels: Array):
        network, states = build(BATCH_NORMS[name], linear)
        arrays, static = eqx.partition(network, eqx.is_inexact_array)
        self._given = images, labels
        self._carried = arrays, states, OPTIMISER.init(arrays), jnp.zeros(())

        def step(carried: Any, images: Any, labels: Any) -> Any:
            arrays, states, memory, _ = carried

            def of(arrays: Any) -> Any:
                return loss(eqx.combine(arrays, static), states, images, labels)

            (value, states), slope = jax.value_and_grad(of, has_aux=True)(arrays)
            change, memory = OPTIMISER.update(slope, memory)
            return optax.apply_updates(arrays, change), states, memory, value

        self._step = jax.jit(step).lower(self._carried, *self._given).compile()

    def _call(self) -> None:
        self._carried = self._step(self._carried, *self._given)

    def time(self, calls: int) -> Taken:
        wait = lambda: jax.block_until_ready(self._carried[-1])  # noqa: E731
        return gpu_run_timing.by_the_clock(self._call, wait, calls)

    @property
    def loss(self) -> float:
        return float(np.asarray(self._carried[-1]))


def measure(
    names: list[str],
    sizes: Sizes,
    dtype: str,
    rounds: int,
    least: float,
    pool: Executor,
) -> list[Row]:
    linear = initial(sizes, DTYPES[dtype])
    shape = (sizes.batch, 3, sizes.image, sizes.image)
    keys = jax.random.split(jax.random.key(1))
    images = jax.random.normal(keys[0], shape, DTYPES[dtype])
    labels = jax.random.randint(keys[1], shape[:1], 0, sizes.classes)
    trainings: dict[str, Future[Training]] = {
        name: pool.submit(Training, name, linear, images, labels) for name in names
    }
    for training in trainings.values():
        training.exception()  # waits: nothing should be compiled while something is timed
    times = interleave({n: t.result for n, t in trainings.items()}, rounds, least)
    rows = []
    for name, taken in times.items():
        row = Row(TRAIN, "x".join(map(str, shape)), "", dtype, STEP, name)
        if not isinstance(taken, Exception) and not np.isfinite(trainings[name].result().loss):
            taken = FloatingPointError("the loss is not finite")
        rows.append(timed(row, taken, np.nan, np.nan))
    return rows
