"""Tests that the layer normalises as the recursions say, far from zero and over many steps."""

from typing import Any

import equinox as eqx
import numpy as np
import pytest

from eqx_norm import strategies
from tests.exact import EPS
from tests.helpers import call, each_approach, make
from tests.strategies.recursions import reference

pytestmark = pytest.mark.x32  # the bound is float32's
CHANNELS, STEPS, MOMENTUM = 8, 100, 0.99
# So that most steps are corrected, or clipped.
OPTIONS: dict[str, Any] = {
    "renorm": {"r_max": 3.0, "d_max": 5.0},
    "variance_clip": {"ratio": 4.0, "start": 5},
}


def strategy_of(approach):
    options = OPTIONS.get(approach, {})
    if approach == "renorm":
        return strategies.Renorm(MOMENTUM, **options)
    if approach == "variance_clip":
        return strategies.VarianceClip(strategies.Batch(MOMENTUM), **options)
    return strategies.named(approach, MOMENTUM)


def drifting(ratio):
    """Yields x, [16, CHANNELS, 4], whose mean drifts, and jumps once."""
    random = np.random.RandomState(round(np.log10(ratio)))
    std = 10 ** random.uniform(-1, 1, (CHANNELS, 1))
    mean = ratio * std * np.where(np.arange(CHANNELS) % 2, -1, 1)[:, None]
    for step in range(STEPS):
        mean = mean + std * (random.standard_normal(std.shape) + 30 * (step == STEPS // 2))
        spread = std * 2 ** random.uniform(-1, 1, std.shape)
        yield (mean + spread * random.standard_normal((16, CHANNELS, 4))).astype(np.float32)


@each_approach
@pytest.mark.parametrize("ratio", [1.0, 1e3, 1e7])
def test_y_far_from_zero_over_many_steps(approach, ratio):
    layer, state = make(CHANNELS, "batch", eps=EPS, approach=strategy_of(approach))
    inference, batches = eqx.nn.inference_mode(layer), [*drifting(ratio)]
    moments = [(x.mean((0, 2)), x.var((0, 2))) for x in map(np.longdouble, batches)]
    recursion = "batch" if approach == "variance_clip" else approach
    options = OPTIONS.get(approach, {})
    expected = reference(recursion, moments, np.longdouble(MOMENTUM), **options)
    for x, statistics in zip(batches, expected, strict=True):
        y, state = call(layer, state, x)
        inferred, state = call(inference, state, x)
        for actual, (mean, variance) in zip((y, inferred), statistics, strict=True):
            rstd = 1 / np.sqrt(variance + np.longdouble(EPS))
            xhat = (x - mean[:, None]) * rstd[:, None]
            error = np.abs(np.asarray(actual) - xhat) / np.maximum(1, np.abs(xhat))
            assert error.max() <= 1e-6
