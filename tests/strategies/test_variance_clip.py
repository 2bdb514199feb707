"""Tests where `VarianceClip` clips nothing, and its recovery from constant batches.

test_recursions.py tests the bounds over many steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.strategies import Batch, Moments, VarianceClip
from tests.compiling import jit
from tests.helpers import at_step, call, f32, make, normal, same


@pytest.mark.parametrize(("eps", "is_clipped"), [(3.9, True), (4.1, False)])
def test_clipping_starts_when_the_mean_running_variance_exceeds_eps(eps, is_clipped):
    clip, running = VarianceClip(Batch(0.9), start=1), np.array([0.5, 2.0, 9.5])  # 4 on average
    memory = clip.load(Moments.of(f32([0, 0, 0]), f32(running)))
    batch = at_step(1, Moments(f32(8), f32([1, -2, 0]), f32(8 * 1e6 * running)), eps)
    used, after = jit(clip.update)(batch, memory)
    expected = 4 * (running + 4) if is_clipped else 1e6 * running
    np.testing.assert_allclose(used.variance, expected, rtol=2e-6)
    learnt = 0.9 * running + 0.1 * expected
    np.testing.assert_allclose(clip.infer(after).variance, learnt, rtol=2e-6)


def test_clipping_leaves_batches_before_its_start_and_within_its_bounds_unchanged():
    clip, plain = VarianceClip(Batch(0.9), start=2), Batch(0.9)
    clipped, memory = (strategy.init(50, jnp.float32) for strategy in (clip, plain))
    spread = np.linspace(1, 1.5, 50)
    for step, variance in enumerate((1.1, 20.0, 2.9, 3.3)):
        batch = at_step(step, Moments(f32(7), f32(spread), f32(7 * variance * spread)))
        used, clipped = jax.jit(clip.update)(batch, clipped)
        expected, memory = jax.jit(plain.update)(batch, memory)
        assert same((used, clipped), (expected, memory))


LAYER, STATE = make(3, "batch", approach="variance_clip")


@jax.jit
def deviations(x):
    """Returns the standard deviations of the outputs for each batch, as training goes on."""

    def step(state, x):
        y, state = call(LAYER, state, x)
        return state, y.std(0)

    return jax.lax.scan(step, STATE, x)[1]


@pytest.mark.parametrize("quiet", [0.0, 1e-30, 1e-15, 1e-3, [0.0, 1.0, 1.0]], ids=str)
def test_clipping_recovers_from_constant_batches(quiet):
    """Starts from constant batches, as of a last layer that starts at 0. Bounds that stayed
    [0, 0] gave outputs a standard deviation of 334. In the last case one channel is dead."""
    scale = jnp.where(jnp.arange(270)[:, None, None] < 210, f32(quiet), 1)
    later = np.asarray(deviations(normal(0, (270, 64, 3)) * scale)[210:])
    # After one batch g is 1/211 or more, and the next batch is clipped to 4 (g + g).
    assert later.max() < (8 / 230) ** -0.5
    np.testing.assert_allclose(later[[0, -1]], 1, atol=0.01)
