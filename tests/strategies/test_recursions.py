"""Tests that each strategy equals its recursion, and that roundings do not accumulate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.strategies import (
    NAMED,
    Adam,
    Batch,
    Ema,
    Moments,
    Pair,
    Ramp,
    Renorm,
    Running,
    SmoothStart,
    VarianceClip,
)
from tests.helpers import at_step, exact, f32

from .recursions import reference

pytestmark = pytest.mark.x32  # averages are float32, whatever the default
CHANNELS = 3
ULP = float(np.finfo(np.float32).eps)
MOMENTA = (
    0.5,
    0.99,
    0.999999,
    *(pytest.param(m, marks=pytest.mark.long) for m in (1e-6, 0.9999)),
)
each_momentum = pytest.mark.parametrize("momentum", MOMENTA)
# Bounds that are first closed, then half open, then open.
RENORM = functools.partial(Renorm, r_max=Ramp(1, 3, 5, 25), d_max=Ramp(0, 5, 10, 20))
BOUNDS = {
    "r_max": lambda step: np.interp(step, [5, 25], [1, 3]),
    "d_max": lambda step: np.interp(step, [10, 20], [0, 5]),
}
PLAIN = {"batch": Batch, "ema": Ema, "adam": Adam, "smooth_start": SmoothStart}


def clipped(strategy, approach, **options):
    def made(momentum):
        return VarianceClip(strategy(momentum), **options)

    return made, approach, options


# A strategy as a function of the momentum, its recursion, and the recursion's options.
CASES = {
    **{name: (strategy, name, {}) for name, strategy in PLAIN.items()},
    "renorm": (RENORM, "renorm", BOUNDS),
    "variance_clip": clipped(Batch, "batch", ratio=2.0, start=4),
    "clip(smooth_start)": clipped(SmoothStart, "smooth_start", ratio=4.0, start=1),
    "clip(ema), later": clipped(Ema, "ema", ratio=4.0, start=200),
}


def test_every_named_approach_has_a_recursion():
    assert NAMED.keys() <= CASES.keys()


@each_momentum
@pytest.mark.parametrize(("strategy", "approach", "options"), CASES.values(), ids=CASES)
def test_strategy_equals_its_recursion(strategy, approach, options, momentum):
    strategy = strategy(momentum)
    memory, update = strategy.init(CHANNELS, jnp.float32), jax.jit(strategy.update)
    random = np.random.RandomState(0)
    size = np.array([1e-2, 1.0, 1e2])  # channels of very different size
    means = size * random.standard_normal((40, CHANNELS))
    variances = size**2 * random.uniform(0.1, 10, (40, CHANNELS))
    # Roundings do not accumulate: the bound is the rounding of one step, its two weights and
    # the batches to float32, on the scale of the largest batch.
    scale = np.max([np.abs(means), variances], axis=1)
    recursion = reference(approach, zip(means, variances, strict=True), momentum, **options)
    for step, expected in enumerate(recursion):
        batch = at_step(step, Moments.of(f32(means[step]), f32(variances[step])))
        used, memory = update(batch, memory)
        for actual, statistics in zip((used, strategy.infer(memory)), expected, strict=True):
            errors = ([actual.mean, actual.variance] - statistics) / scale
            assert np.abs(errors).max() <= 4 * ULP


@each_momentum
def test_running_averages_over_thousands_of_steps(momentum):
    """Checks both averages of `Running`, which all strategies use for normalisation."""
    steps = 3000
    random = np.random.RandomState(1)
    mean = (1e4 + random.standard_normal((steps, CHANNELS))).astype(np.float32)
    variance = random.uniform(0.5, 2, (steps, CHANNELS)).astype(np.float32)

    def step(running, batch):
        used, running = SmoothStart(momentum).update(Moments.of(*batch), running)
        both = [(m.mean_pair, m.variance) for m in (used, running.moments)]
        return running, (both, running.weight(momentum))

    empty = Running.empty(CHANNELS, jnp.float32)
    scan = jax.jit(lambda *batches: jax.lax.scan(step, empty, batches)[1])
    both, weight = scan(mean, variance)
    batches = zip(*map(np.float64, (mean, variance)), strict=True)
    expected = np.array(list(reference("smooth_start", batches, momentum)))
    for i, (mean, variance) in enumerate(both):
        # Means have twice the precision: in float32 alone, 1e4 is off by 5e-4.
        np.testing.assert_allclose(exact(mean), expected[:, i, 0], rtol=0, atol=8 * ULP)
        np.testing.assert_allclose(variance, expected[:, i, 1], rtol=8 * ULP)
    weights = -np.expm1(np.arange(1, steps + 1) * np.log(momentum))
    np.testing.assert_allclose(weight, weights, rtol=4 * ULP)


@pytest.mark.parametrize("strategy", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("momentum", [*MOMENTA, 1 / 3])
# Of earlier versions the empty memory was 0.
@pytest.mark.parametrize("is_of_before", [False, pytest.param(True, marks=pytest.mark.long)])
def test_repeated_first_batch_is_remembered_to_the_bit(momentum, strategy, is_of_before):
    random = np.random.RandomState(2)
    mean = f32(1e3 * random.standard_normal(99))
    rest = mean * f32(random.uniform(-1, 1, 99) * ULP / 4)  # what the mean's rounding may lose
    first = Moments(f32(7), Pair.of(mean, rest), f32(random.uniform(0, 1, 99)))
    strategy = strategy(momentum)
    memory, update = strategy.init(99, jnp.float32), jax.jit(strategy.update)
    if is_of_before:
        memory = jax.tree.map(jnp.zeros_like, memory)
    assert (strategy.infer(memory).mean == 0).all() & (
        strategy.infer(memory).variance == 1
    ).all()
    for step in range(50):
        used, memory = update(at_step(step, first), memory)
        for moments in (used, strategy.infer(memory)):
            np.testing.assert_array_equal(moments.mean_pair.parts, first.mean_pair.parts)
            np.testing.assert_array_equal(moments.variance, first.variance)


def test_running_averages_at_a_momentum_near_0():
    """Fails if r + share (b - r) cancels, which loses 4% of the variance."""
    running = Running.empty(1, jnp.float32)
    for variance in (1e6, 1.0):
        running = running.push(Moments.of(f32([0.0]), f32([variance])), 1e-6)
    expected = (1e-6 * 1e6 + 1) / (1 + 1e-6)
    np.testing.assert_allclose(running.variance, [expected], rtol=4 * ULP)
