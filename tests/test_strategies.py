"""Each strategy equals its formula, written out below in NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import strategies
from eqx_norm.strategies import (
    AbstractStrategy,
    Adam,
    Batch,
    Ema,
    Moments,
    SmoothStart,
    VarianceClip,
)

from .helpers import f32

CHANNELS = 3


def batches(steps):
    """`steps` pairs (mean, variance), with channels of very different size."""
    random = np.random.RandomState(0)
    size = np.array([1e-2, 1.0, 1e2])
    return [
        (size * random.standard_normal(CHANNELS), size**2 * random.uniform(0.1, 10, CHANNELS))
        for _ in range(steps)
    ]


# Each of these yields, per batch, (mean, variance) for training and the same for inference.


def golden_batch(batches, m):
    h, w = 0.0, 0.0
    for b in map(np.array, batches):
        h, w = m * h + (1 - m) * b, m * w + 1 - m
        yield b, h / w


def golden_ema(batches, m):
    r = None
    for b in map(np.array, batches):
        r = b if r is None else m * r + (1 - m) * b
        yield r, r


def golden_adam(batches, m):
    for _, debiased in golden_batch(batches, m):
        yield debiased, debiased


def golden_smooth_start(batches, m):
    h = 0.0
    for k, b in enumerate(map(np.array, batches), start=1):
        h = m * h + (1 - m) * b
        yield h + m**k * b, h / (1 - m**k)


def golden_variance_clip(golden, ratio, start):
    def run(batches, m):
        clipped = []
        for k, (mean, variance) in enumerate(batches):
            if k >= start:
                *_, (_, (_, g)) = golden(clipped, m)
                variance = np.clip(variance, g / ratio, ratio * (g + g.mean()))
            clipped.append((mean, variance))
            *_, last = golden(clipped, m)
            yield last

    return run


CASES = [
    (Batch, golden_batch),
    (Ema, golden_ema),
    (Adam, golden_adam),
    (SmoothStart, golden_smooth_start),
    (
        lambda m: VarianceClip(Batch(m), ratio=2.0, start=4),
        golden_variance_clip(golden_batch, 2.0, 4),
    ),
    (
        lambda m: VarianceClip(SmoothStart(m), ratio=4.0, start=1),
        golden_variance_clip(golden_smooth_start, 4.0, 1),
    ),
    (
        lambda m: VarianceClip(Ema(m), ratio=4.0, start=200),
        golden_variance_clip(golden_ema, 4.0, 200),
    ),
]
IDS = ["batch", "ema", "adam", "smooth_start", "clip(batch)", "clip(smooth_start)", "clip(ema)"]


@pytest.mark.parametrize("momentum", [0.5, 0.99, 0.9999])
@pytest.mark.parametrize(("strategy", "golden"), CASES, ids=IDS)
def test_equals_its_formula(strategy, golden, momentum):
    strategy = strategy(momentum)
    memory = strategy.init(CHANNELS, jnp.float32)
    update = jax.jit(strategy.update)
    history = batches(40)
    for (mean, variance), (train, infer) in zip(
        history, golden(history, momentum), strict=True
    ):
        batch = Moments.of(f32(mean), f32(variance))
        used, memory = update(batch, memory)
        for ours, right in ((used, train), (strategy.infer(memory), infer)):
            # 40 roundings at most, each of half an ulp of the largest value so far. Debiasing
            # divides by w = 1 - m^k; h and w have the same rounded factors, so it adds none.
            scale = np.max([[abs(m), v] for m, v in history], axis=0)
            np.testing.assert_allclose(
                [ours.mean, ours.variance] / scale, right / scale, atol=40 * 6e-8
            )


@pytest.mark.parametrize("name", strategies.NAMED)
def test_before_any_batch_inference_is_the_identity(name):
    strategy = strategies.named(name, 0.9)
    used = strategy.infer(strategy.init(CHANNELS, jnp.float32))
    np.testing.assert_array_equal(used.mean, np.zeros(CHANNELS))
    np.testing.assert_array_equal(used.variance, np.ones(CHANNELS))


@pytest.mark.parametrize("strategy", [Batch(0.9), Adam(0.9), SmoothStart(0.9), Ema(0.9)])
def test_loaded_statistics_are_never_debiased(strategy):
    loaded = strategies.Running.loaded(f32([3.0]), f32([4.0]))
    used = strategy.infer(loaded)
    assert (used.mean, used.variance) == (3, 4)
    _, after = strategy.update(Moments.of(f32([3.0]), f32([4.0])), loaded)
    np.testing.assert_allclose(strategy.infer(after).mean, [3], rtol=1e-6)
    np.testing.assert_allclose(strategy.infer(after).variance, [4], rtol=1e-6)


def test_clipping_leaves_a_batch_within_the_bounds_as_it_was():
    clip, plain = VarianceClip(Batch(0.9), start=1), Batch(0.9)
    clipped, memory = clip.init(1, jnp.float32), plain.init(1, jnp.float32)
    for variance in (1.1, 0.37, 2.9, 3.3):
        batch = Moments(f32(7), f32([0.1]), f32([7 * variance]))
        used, clipped = clip.update(batch, clipped)
        right, memory = plain.update(batch, memory)
        jax.tree.map(np.testing.assert_array_equal, used, right)
        jax.tree.map(np.testing.assert_array_equal, clipped.wrapped, memory)


# What `VarianceClip` is to wrap: all of ours, itself, and a stranger.


class Cumulative(AbstractStrategy[Moments]):
    """Normalises by all values so far."""

    def init(self, channels, dtype):
        return Moments.zero(channels, dtype)

    def update(self, batch, memory):
        memory = memory.merge(batch)
        return memory, memory

    def infer(self, memory):
        return memory


WRAPPED = [
    Batch(0.9),
    Ema(0.9),
    Adam(0.9),
    SmoothStart(0.9),
    VarianceClip(Batch(0.9), ratio=3.0, start=2),
    Cumulative(),
]
G = np.array([0.5, 2.0, 9.5])  # the mean over channels is 4


def settled(strategy, batches):
    """The memory after so many batches of variance G, which is then the running variance."""
    memory = strategy.init(CHANNELS, jnp.float32)
    for _ in range(batches):
        _, memory = strategy.update(of_variance(G), memory)
    np.testing.assert_allclose(strategy.infer(memory).variance, G, rtol=1e-6)
    return memory


def of_variance(variance, count=8.0):
    return Moments(f32(count), f32([1.0, -2.0, 0.0]), f32(count * np.asarray(variance)))


CLIPPED = {
    "far above": (1e6 * G, 4 * (G + 4)),
    "above 4 G, but within the channels' average": (4 * G + 1, 4 * G + 1),
    "far below": (1e-6 * G, G / 4),
    "zero": (0 * G, G / 4),
    "one of each": ([1e6, 3.0, 0.0], [4 * (0.5 + 4), 3.0, 9.5 / 4]),
}


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("wrapped", WRAPPED, ids=repr)
def test_normalisation_and_memory_see_the_clipped_batch(wrapped, name):
    """As if the wrapped strategy had been given a batch that is within the bounds."""
    variance, within = CLIPPED[name]
    clip = VarianceClip(wrapped, ratio=4.0, start=3)
    used, memory = clip.update(of_variance(variance), settled(clip, 3))
    right, right_memory = wrapped.update(of_variance(within), settled(wrapped, 3))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6)
    jax.tree.map(close, used, right)
    jax.tree.map(close, memory.wrapped, right_memory)
    jax.tree.map(close, clip.infer(memory), wrapped.infer(right_memory))
    assert memory.batches == 4


@pytest.mark.parametrize("wrapped", WRAPPED, ids=repr)
def test_clipping_starts_after_so_many_batches(wrapped):
    clip, corrupted = VarianceClip(wrapped, ratio=2.0, start=3), of_variance(1e6 * G)
    for batches in (2, 3):
        used, memory = clip.update(corrupted, settled(clip, batches))
        unclipped, unprotected = wrapped.update(corrupted, settled(wrapped, batches))
        for ours, plain in (
            (used, unclipped),
            (clip.infer(memory), wrapped.infer(unprotected)),
        ):
            if batches < clip.start:
                np.testing.assert_array_equal(ours.variance, plain.variance)
            else:
                assert (ours.variance < plain.variance).all()


@pytest.mark.parametrize("strategy", [Batch, Ema, Adam, SmoothStart])
@pytest.mark.parametrize("momentum", [0.0, 1.0, -0.5, 99.0, float("nan")])
def test_momentum_outside_0_1_is_an_error(strategy, momentum):
    with pytest.raises(ValueError, match=rf"momentum={momentum}.*strictly between 0 and 1"):
        strategy(momentum)


def test_clip_arguments():
    with pytest.raises(ValueError, match=r"ratio=1\.0.*greater than 1"):
        VarianceClip(ratio=1.0)
    with pytest.raises(ValueError, match=r"start=0.*after 1 batch at the earliest"):
        VarianceClip(start=0)
