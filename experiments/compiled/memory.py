"""Has a ResNet-50's training step compiled, with and without recomputing the norms' outputs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_norm import BatchNorm, recompute_outputs
from experiments.lab.peers import names

from . import compiler, traffic

DEVICE, BATCH, IMAGE = "H200", 32, 224
# The width of the blocks of each stage, how many there are, and the stride of the first.
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
_CASES = ((names.OURS, False), (names.OURS, True), (names.EQUINOX_BATCH, False))


class Needed(NamedTuple):
    """Says what a training step needs, in bytes, and its compilation in seconds."""

    blocks: int  # of a ResNet-50 16
    layer: str
    dtype: str
    recomputes: bool
    kept: int  # by JAX for the backward pass, the weights included
    temporaries: int  # of XLA, which may keep less, or more
    moved: int
    seconds: float  # of the processor, to lower and compile it


class Bottleneck(eqx.Module):
    """Is three convolutions and their norms, added to what they are given."""

    convs: list[eqx.nn.Conv2d]
    norms: list[Any]
    shortcut: tuple[eqx.nn.Conv2d, Any] | None

    def __init__(self, inputs: int, width: int, stride: int, make: Any, conv: Any):
        self.convs = [conv(inputs, width, 1), conv(width, width, 3, stride, padding=1)]
        self.convs.append(conv(width, 4 * width, 1))
        self.norms = [make(width), make(width), make(4 * width)]
        changes = stride > 1 or inputs != 4 * width
        other = conv(inputs, 4 * width, 1, stride), make(4 * width)
        self.shortcut = other if changes else None

    def __call__(self, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        y = x
        for conv, norm in zip(self.convs[:2], self.norms[:2], strict=True):
            y, state = norm(conv(y), state)
            y = jax.nn.relu(y)
        y, state = self.norms[2](self.convs[2](y), state)
        if self.shortcut is not None:
            conv, norm = self.shortcut
            x, state = norm(conv(x), state)
        return jax.nn.relu(x + y), state


class ResNet(eqx.Module):
    """Is ResNet-50, of He, Zhang, Ren and Sun, https://arxiv.org/abs/1512.03385."""

    stem: eqx.nn.Conv2d
    norm: Any
    pool: eqx.nn.MaxPool2d
    blocks: list[Bottleneck]
    linear: eqx.nn.Linear

    def __init__(self, stages: Any, make: Callable[[int], Any], dtype: Any, key: Array):
        conv = functools.partial(eqx.nn.Conv2d, use_bias=False, dtype=dtype, key=key)
        self.stem, self.norm = conv(3, 64, 7, 2, padding=3), make(64)
        self.pool = eqx.nn.MaxPool2d(3, 2, padding=1)
        self.blocks, inputs = [], 64
        for width, count, stride in stages:
            for i in range(count):
                self.blocks.append(Bottleneck(inputs, width, 1 if i else stride, make, conv))
                inputs = 4 * width
        self.linear = eqx.nn.Linear(inputs, 1000, dtype=dtype, key=key)

    def __call__(self, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        x, state = self.norm(self.stem(x), state)
        x = self.pool(jax.nn.relu(x))
        for block in self.blocks:
            x, state = block(x, state)
        return self.linear(x.mean((1, 2))), state


def compiled(quick: bool = False) -> list[Needed]:
    """Returns what each step needs; call this in a process of its own."""
    mesh = compiler.mesh(DEVICE)
    on_it = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    dtypes = ("bfloat16",) if quick else ("bfloat16", "float32")
    return [_step(mesh, on_it, *case, dtype, quick) for dtype in dtypes for case in _CASES]


def _step(
    mesh: Any, on_it: Any, layer: str, recomputes: bool, dtype: str, quick: bool
) -> Needed:
    def make(channels: int) -> Any:
        if layer == names.OURS:
            return BatchNorm(channels, "batch", approach="batch")
        return eqx.nn.BatchNorm(channels, "batch", mode="batch", dtype=jnp.dtype(dtype))

    def described(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_it), tree
        )

    stages = STAGES[:1] if quick else STAGES

    def made(key: Array) -> Any:
        model, state = eqx.nn.make_with_state(ResNet)(stages, make, jnp.dtype(dtype), key)
        return eqx.partition(model, eqx.is_inexact_array), state

    ((weights, static), state) = eqx.filter_eval_shape(made, jax.random.key(0))
    others, static = eqx.partition(static, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(weights: Any, others: Any, state: Any, x: Array, labels: Array) -> Any:
        model = eqx.combine(weights, others, static)
        forward = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = forward(x, state)
        picked = jnp.take_along_axis(jax.nn.log_softmax(y), labels[:, None], axis=1)
        return -picked.astype(jnp.float32).mean(), state

    if recomputes:
        loss = jax.checkpoint(loss, policy=recompute_outputs)

    def step(weights: Any, *rest: Any) -> Any:
        value, gradients = jax.value_and_grad(loss, has_aux=True)(weights, *rest)
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), weights, gradients), value

    batch, image = (8, 64) if quick else (BATCH, IMAGE)
    x = jax.ShapeDtypeStruct((batch, 3, image, image), jnp.dtype(dtype))
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    rest = others, state, x, labels
    kept = jax.eval_shape(
        lambda weights, *rest: jax.vjp(lambda w: loss(w, *rest), weights, has_aux=True)[1],
        weights,
        *rest,
    )

    def built() -> tuple[Any, float]:
        jax.clear_caches()
        return compiler.timed(mesh, step, *described((weights, *rest)))

    # The first compilation of a process takes longer, and others may take the processor.
    found, seconds = built()
    if not quick:
        seconds = min(seconds, *(built()[1] for _ in range(2)))
    return Needed(
        sum(count for _, count, _ in stages),
        layer,
        dtype,
        recomputes,
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)),
        found.memory_analysis().temp_size_in_bytes,
        sum(launch.bytes for launch in traffic.launches(found.as_text() or "")),
        round(seconds, 2),
    )
