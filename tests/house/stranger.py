"""Defines a user's strategy and calls for the type checkers of test_wheel.py, not to import."""

from typing import assert_type

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array

from eqx_norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from eqx_norm.determinism import compare, monitor, monitor_module
from eqx_norm.models import TorchReport, freeze, from_torch, recalibrate, swap
from eqx_norm.strategies import AbstractStrategy, Batch, Moments, TrainingBatch


class Average(eqx.Module):
    mean: Array
    variance: Array


class Running(AbstractStrategy[Average]):
    """Normalises by the batch, and infers by a running average."""

    momentum: float = eqx.field(default=0.9, static=True)

    def init(self, channels: int, dtype: DTypeLike) -> Average:
        zero = Moments.zero(channels, dtype)
        return Average(zero.mean, zero.m2)

    def update(self, batch: TrainingBatch, memory: Average) -> tuple[Moments, Average]:
        mean = memory.mean + (1 - self.momentum) * (batch.mean - memory.mean)
        return batch, Average(mean, batch.variance)

    def infer(self, memory: Average) -> Moments:
        return Moments.of(memory.mean, memory.variance)


def types(model: eqx.nn.MLP, norm: BatchNorm, state: eqx.nn.State, x: Array) -> None:
    """Checks that a type checker infers types, and not Any."""
    BatchNorm(8, ("batch", "devices"), mode="ema", approach=Batch(0.5), unbiased=True)
    BatchNorm(8, "batch", approach=Running(), activation=jax.nn.relu)
    BatchNorm(8, "batch", momentum="0.9")  # type: ignore[arg-type]
    assert_type(norm(x, state, mask=x[0] > 0), tuple[Array, eqx.nn.State])
    for layer in (GroupNorm(2, 8), InstanceNorm(8), LayerNorm(8), RMSNorm((4,))):
        assert_type(layer(x), Array)
    assert_type(swap(model, state, approach=Running(0.99)), tuple[eqx.nn.MLP, eqx.nn.State])
    assert_type(swap(LayerNorm(8)), tuple[LayerNorm, None])
    assert_type(freeze(model), eqx.nn.MLP)
    assert_type(from_torch(model, state, {}), tuple[eqx.nn.MLP, eqx.nn.State, TorchReport])
    assert_type(from_torch(model, None, {}), tuple[eqx.nn.MLP, None, TorchReport])
    assert_type(recalibrate(model, state, [x]), eqx.nn.State)
    assert_type(monitor(x, "x"), Array)
    assert_type(monitor_module(model), eqx.nn.MLP)
    assert_type(compare("a", "b").same, bool)
