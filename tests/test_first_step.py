"""Inference is right from the first step on, for every approach."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm

from .helpers import APPROACHES, make, normal, remembered
from .helpers import quick_call as call

STEPS = (1, 2, 5, 10, 100)
STD = np.array([1e-2, 0.1, 1.0, 10.0], np.float32)  # variances 1e-4, 0.01, 1, 100
MEAN = np.array([0.3, -2.0, 5.0, -70.0], np.float32)


def batch(step):
    """4,096 samples a channel whose mean and standard deviation are MEAN and STD exactly."""
    values = np.random.RandomState(step).standard_normal((64, 4, 64))
    values -= values.mean((0, 2), keepdims=True)
    values /= values.std((0, 2), keepdims=True)
    return jnp.asarray(values * STD[:, None] + MEAN[:, None], jnp.float32)


@pytest.mark.parametrize("momentum", [0.9, 0.99])
@pytest.mark.parametrize("approach", APPROACHES)
def test_inference_statistics(approach, momentum):
    layer, state = make(4, "batch", approach=approach, momentum=momentum)
    for step in range(1, max(STEPS) + 1):
        _, state = call(layer, state, batch(step % 7))
        if step in STEPS:
            mean, variance = remembered(layer, state)
            assert np.all(np.abs(mean - MEAN) < 0.05 * STD), step
            assert np.all(np.abs(variance / STD**2 - 1) < 0.05), step
            y, _ = call(eqx.nn.inference_mode(layer), state, batch(0))
            right = (batch(0) - MEAN[:, None]) / np.sqrt(STD[:, None] ** 2 + 1e-5)
            # 0.05 from the mean, and half of 5% of a value, |value| < 4.5, from the variance.
            np.testing.assert_allclose(y, right, atol=0.05 + 0.025 * 4.5)


@pytest.mark.parametrize("approach", APPROACHES)
def test_before_training_inference_is_the_identity(approach):
    layer, state = make(4, "batch", approach=approach, inference=True)
    x = normal(0, (8, 4, 3), 1, 3)
    np.testing.assert_allclose(call(layer, state, x)[0], x, rtol=1e-5)


@pytest.mark.parametrize("approach", APPROACHES)
def test_ten_layers_after_one_step(approach):
    def stack():
        layers = [BatchNorm(4, "batch", approach=approach) for _ in range(10)]
        return eqx.nn.Sequential(layers)

    model, state = eqx.nn.make_with_state(stack)()
    x = batch(0)
    _, state = call(model, state, x)
    y, _ = call(eqx.nn.inference_mode(model), state, x)
    # Channels of variance 1e-4 are damped by eps = 1e-5: sqrt(1e-4 / 1.1e-4) = 0.953.
    assert 0.9 < y.std() < 1.1
    assert np.all((y.std((0, 2)) > 0.9) & (y.std((0, 2)) < 1.1))
