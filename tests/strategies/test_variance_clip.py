"""Tests which variances `VarianceClip` clips, and its recovery from constant batches.

test_recursions.py tests its start and many steps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.strategies import Adam, Batch, Ema, Moments, SmoothStart, VarianceClip
from tests.helpers import Cumulative, at_step, call, f32, make, normal

WRAPPED = [Batch(0.9), Ema(0.9), Adam(0.9), SmoothStart(0.9), Cumulative()]
WRAPPED += [VarianceClip(Batch(0.9), ratio=3.0, start=2)]
G = np.array([0.5, 2.0, 9.5])  # the mean over channels is 4


def of_variance(variance, step, eps=1e-5):
    m2 = f32(8 * np.asarray(variance))
    return at_step(step, Moments(f32(8), f32([1.0, -2.0, 0.0]), m2), eps)


def after_batches_of_g(strategy):
    """Returns the memory after three batches of variance G, with running variance G."""
    memory = strategy.init(3, jnp.float32)
    for step in range(3):
        _, memory = strategy.update(of_variance(G, step), memory)
    np.testing.assert_allclose(strategy.infer(memory).variance, G, rtol=1e-6)
    return memory


# The variance of a batch, the clipped variance, and the layer's eps.
CLIPPED = {
    "far above": (1e6 * G, 4 * (G + 4), 3.9),
    "above 4 G, but within the channels' average": (4 * G + 1, 4 * G + 1, 1e-5),
    "far below": (1e-6 * G, G / 4, 1e-5),
    "above, within and 0": ([1e6, 3.0, 0.0], [4 * (0.5 + 4), 3.0, 9.5 / 4], 1e-5),
    "running variance below eps": (1e6 * G, 1e6 * G, 4.1),
}


@pytest.mark.parametrize(("variance", "within", "eps"), CLIPPED.values(), ids=CLIPPED)
@pytest.mark.parametrize("wrapped", WRAPPED, ids=repr)
def test_normalisation_and_memory_use_the_clipped_batch(wrapped, variance, within, eps):
    """Compares with the wrapped strategy, given a batch within the bounds."""
    clip = VarianceClip(wrapped, ratio=4.0, start=3)
    used, memory = clip.update(of_variance(variance, 3, eps), after_batches_of_g(clip))
    expected = wrapped.update(of_variance(within, 3, eps), after_batches_of_g(wrapped))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6)
    jax.tree.map(close, used, expected[0])
    # Errors of the rests, and of a mean of 0, are on the scale of the statistics.
    jax.tree.map(functools.partial(close, atol=2e-6), memory, expected[1])
    jax.tree.map(close, clip.infer(memory), wrapped.infer(expected[1]))


def test_clipping_leaves_a_batch_within_the_bounds_unchanged():
    clip, plain = VarianceClip(Batch(0.9), start=1), Batch(0.9)
    clipped, memory = clip.init(1, jnp.float32), plain.init(1, jnp.float32)
    for step, variance in enumerate((1.1, 0.37, 2.9, 3.3)):
        batch = at_step(step, Moments(f32(7), f32([0.1]), f32([7 * variance])))
        used, clipped = clip.update(batch, clipped)
        expected, memory = plain.update(batch, memory)
        jax.tree.map(np.testing.assert_array_equal, (used, clipped), (expected, memory))


@pytest.mark.parametrize("quiet", [0.0, 1e-30, 1e-15, 1e-3, [0.0, 1.0, 1.0]], ids=str)
def test_clipping_recovers_from_constant_batches(quiet):
    """Starts from constant batches, as of a last layer that starts at 0. Bounds that stayed
    [0, 0] gave outputs a standard deviation of 334. In the last case one channel is dead."""
    layer, state = make(3, "batch", approach="variance_clip")
    scale = jnp.where(jnp.arange(270)[:, None, None] < 210, f32(quiet), 1)

    def step(state, x):
        y, state = call(layer, state, x)
        return state, y.std(0)

    x = normal(0, (270, 64, 3)) * scale
    _, deviations = jax.jit(lambda s: jax.lax.scan(step, s, x))(state)
    deviations = np.asarray(deviations[210:])
    # After one batch g is 1/211 or more, and the next batch is clipped to 4 (g + g).
    assert deviations.max() < (8 / 230) ** -0.5
    np.testing.assert_allclose(deviations[[0, -1]], 1, atol=0.01)
