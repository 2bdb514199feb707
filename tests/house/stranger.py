"""A user's strategy and model, for tests/house/test_typing.py: never imported."""

from collections.abc import Mapping
from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from eqx_norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm, ghost_batches
from eqx_norm.determinism import (
    Ledger,
    compare,
    deterministic,
    monitor,
    monitor_module,
    recorded,
)
from eqx_norm.models import (
    TorchReport,
    fold_pairs,
    freeze,
    from_torch,
    recalibrate,
    reconfigure,
    swap,
    to_torch,
    trainable,
    unswap,
)
from eqx_norm.strategies import AbstractStrategy, Batch, Moments, Renorm, TrainingBatch


class Memory(eqx.Module):
    """Running statistics, and their weight so far."""

    mean: Array
    variance: Array
    weight: Array


class Running(AbstractStrategy[Memory]):
    """Normalises by the batch, and infers by a debiased running average."""

    momentum: float = eqx.field(default=0.9, static=True)

    def init(self, channels: int, dtype: DTypeLike) -> Memory:
        zero = Moments.zero(channels, dtype)
        return Memory(zero.mean, zero.m2, jnp.float32(0))

    def update(self, batch: TrainingBatch, memory: Memory) -> tuple[Moments, Memory]:
        share = 1 - self.momentum
        mean = memory.mean + share * (batch.mean - memory.mean)
        variance = memory.variance + share * (batch.variance - memory.variance)
        return batch, Memory(mean, variance, memory.weight + share * (1 - memory.weight))

    def infer(self, memory: Memory) -> Moments:
        weight = jnp.maximum(memory.weight, 1e-6)
        return Moments.of(memory.mean / weight, memory.variance / weight)


class Network(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: BatchNorm
    layer_norm: LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(3, 8, kernel_size=3, key=first)
        self.norm = BatchNorm(8, "batch", approach=Running(0.99), activation=jax.nn.relu)
        self.layer_norm = LayerNorm(8)
        self.head = eqx.nn.Linear(8, 10, key=second)

    def __call__(
        self, x: Float[Array, "3 h w"], state: eqx.nn.State
    ) -> tuple[Float[Array, "10"], eqx.nn.State]:
        features, state = self.norm(self.conv(x), state)
        return self.head(self.layer_norm(features.mean((1, 2)))), state


def forward(model: Network, state: eqx.nn.State, x: Array) -> tuple[Array, eqx.nn.State]:
    both = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    y: Array = both[0]
    after: eqx.nn.State = both[1]
    return y, after


def other_norms(x: Array) -> Array:
    y = InstanceNorm(8)(GroupNorm(groups=2, channels=8)(x))
    return jnp.sum(RMSNorm((4,))(y[0, 0])) + jnp.sum(ghost_batches(x, 2))


def types(model: Network, state: eqx.nn.State, x: Array) -> None:
    """Checks that a type checker sees types, and not Any, where it can."""
    assert_type(model.norm(x, state), tuple[Array, eqx.nn.State])
    assert_type(model.norm(x, state, mask=x[0] > 0), tuple[Array, eqx.nn.State])
    assert_type(model.layer_norm(x), Array)
    assert_type(GroupNorm(2, 8)(x), Array)
    assert_type(InstanceNorm(8)(x), Array)
    assert_type(RMSNorm(8)(x), Array)
    assert_type(ghost_batches(x, 2), Array)
    assert_type(ghost_batches({"x": x}, 2), dict[str, Array])
    assert_type(swap(model, state), tuple[Network, eqx.nn.State])
    assert_type(freeze(model), Network)
    assert_type(from_torch(model, state, {}), tuple[Network, eqx.nn.State, TorchReport])
    assert_type(from_torch(model, None, {}), tuple[Network, None, TorchReport])
    assert_type(recalibrate(model, state, [x]), eqx.nn.State)
    assert_type(Running().infer(Running().init(8, jnp.float32)), Moments)
    assert_type(Moments.zero(8, jnp.float32).merge(Moments.zero(8, jnp.float32)), Moments)
    assert_type(monitor(x, "x"), Array)
    assert_type(monitor_module(model), Network)
    assert_type(compare("a", "b").same, bool)


def settings() -> list[BatchNorm]:
    return [
        BatchNorm(8, "batch", mode="ema"),
        BatchNorm(8, ("batch", "devices"), approach="renorm", momentum=0.9, unbiased=True),
        BatchNorm(8, "batch", approach=Batch(0.5)),
        BatchNorm(
            8, "batch", approach=Renorm(0.9, 3.0, lambda step: jnp.minimum(step / 100, 5.0))
        ),
    ]


def whole_models(
    model: Network, state: eqx.nn.State, weights: Mapping[str, Any], x: Array
) -> tuple[Network, eqx.nn.State]:
    model, state = swap(model, state, "smooth_start", momentum=0.9)
    model, state = swap(model, state, approach=Running(), where=lambda path, _: "norm" in path)
    model, state = reconfigure(model, state, momentum=0.95)
    model, state, report = from_torch(model, state, weights, {"head": "fc"})
    checked: TorchReport = report
    print(checked)
    back: dict[str, Any] = to_torch(model, state)
    state = recalibrate(model, state, [x])
    model = freeze(model)
    spec: Network = trainable(model)
    print(spec)
    model, state = fold_pairs(model, state, {"conv": "norm"})
    model, state = unswap(model, state)
    print(len(back), model.norm.approach)
    return model, state


def two_runs(model: Network, state: eqx.nn.State, x: Array) -> bool:
    print(deterministic(seed=0))

    def step(x: Array) -> Array:
        return jnp.sum(monitor(forward(model, state, x)[0], "y"))

    with Ledger("a.jsonl") as ledger:
        value, record = recorded(step)(x)
        ledger.append(0, record)
        print(value)
    return compare("a.jsonl", "b.jsonl").same
