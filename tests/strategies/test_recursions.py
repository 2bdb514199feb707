"""Tests that each strategy equals its recursion, and that roundings do not add up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import strategies
from eqx_norm.strategies import Adam, Batch, Ema, Moments, Pair, SmoothStart, VarianceClip
from experiments.accuracy import reference
from tests.helpers import at_step, exact, f32

pytestmark = pytest.mark.x32  # its averages are float32 whatever the default
CHANNELS = 3
ULP = float(np.finfo(np.float32).eps)
MOMENTA = (1e-6, 0.5, 0.99, 0.9999, 0.999999)
each_momentum = pytest.mark.parametrize("momentum", MOMENTA)
each_strategy = pytest.mark.parametrize("strategy", [Batch, Ema, Adam, SmoothStart])


def clipping(strategy, name, **clip):
    """Returns a strategy that clips, to be made with a momentum, and its recursion."""
    made = lambda momentum: VarianceClip(strategy(momentum), **clip)  # noqa: E731
    return made, functools.partial(reference, name, **clip)


CASES = {
    "batch": (Batch, functools.partial(reference, "batch")),
    "ema": (Ema, functools.partial(reference, "ema")),
    "adam": (Adam, functools.partial(reference, "adam")),
    "smooth_start": (SmoothStart, functools.partial(reference, "smooth_start")),
    "clip(batch)": clipping(Batch, "batch", ratio=2.0, start=4),
    "clip(smooth_start)": clipping(SmoothStart, "smooth_start", ratio=4.0, start=1),
    "clip(ema)": clipping(Ema, "ema", ratio=4.0, start=200),
}


def batches(steps):
    """Returns `steps` pairs (mean, variance), with channels of very different size."""
    random = np.random.RandomState(0)
    size = np.array([1e-2, 1.0, 1e2])
    return [
        (size * random.standard_normal(CHANNELS), size**2 * random.uniform(0.1, 10, CHANNELS))
        for _ in range(steps)
    ]


def pushed(running, batch, momentum, steps):
    """Returns the average after the given number of equal batches."""

    @jax.jit
    def run(running):
        step = lambda _, running: running.push(batch, momentum)  # noqa: E731
        return jax.lax.fori_loop(0, steps, step, running)

    return run(running)


@each_momentum
@pytest.mark.parametrize(("strategy", "recursion"), CASES.values(), ids=CASES)
def test_equals_its_recursion(strategy, recursion, momentum):
    strategy = strategy(momentum)
    memory = strategy.init(CHANNELS, jnp.float32)
    update = jax.jit(strategy.update)
    history = batches(40)
    for step, ((mean, variance), (train, infer)) in enumerate(
        zip(history, recursion(history, momentum), strict=True)
    ):
        batch = at_step(step, Moments.of(f32(mean), f32(variance)))
        used, memory = update(batch, memory)
        for ours, right in ((used, train), (strategy.infer(memory), infer)):
            # Roundings do not add up: there are those of one step, of its two weights, and of
            # the batches to float32, on the scale of the largest batch.
            scale = np.max([[abs(m), v] for m, v in history], axis=0)
            np.testing.assert_allclose(
                [ours.mean, ours.variance] / scale, right / scale, atol=4 * ULP
            )


@each_strategy
def test_loaded_statistics_are_never_debiased(strategy):
    strategy, loaded = strategy(0.9), strategies.Running.loaded(f32([3.0]), f32([4.0]))
    used = strategy.infer(loaded)
    assert (used.mean, used.variance) == (3, 4)
    _, after = strategy.update(Moments.of(f32([3.0]), f32([4.0])), loaded)
    # A statistic that does not change stays as it is.
    assert (strategy.infer(after).mean, strategy.infer(after).variance) == (3, 4)
    assert after.weight(0.9) == 1
    assert 0 * after.batches == 0  # as in an average of states


@each_strategy
@pytest.mark.parametrize("momentum", [0.0, 1.0, -0.5, 99.0, float("nan")])
def test_momentum_outside_0_1_is_an_error(strategy, momentum):
    with pytest.raises(ValueError, match=rf"momentum={momentum}.*strictly between 0 and 1"):
        strategy(momentum)


@each_momentum
def test_thousands_of_steps(momentum):
    """Checks both averages of `Running`, by which all strategies normalise."""
    steps = 3000
    random = np.random.RandomState(1)
    mean = (1e4 + random.standard_normal((steps, CHANNELS))).astype(np.float32)
    variance = random.uniform(0.5, 2, (steps, CHANNELS)).astype(np.float32)

    @jax.jit
    def average(mean, variance):
        def step(running, batch):
            filled, running = SmoothStart(momentum).update(Moments.of(*batch), running)
            both = running.moments, filled
            found = [(used.mean_pair, used.variance) for used in both]
            return running, (*found, running.weight(momentum))

        empty = strategies.Running.empty(CHANNELS, jnp.float32)
        return jax.lax.scan(step, empty, (mean, variance))[1]

    running, filled, weight = average(mean, variance)
    pairs = zip(*map(np.float64, (mean, variance)), strict=True)
    golden = reference("smooth_start", pairs, momentum)
    right_filled, right = np.swapaxes(list(golden), 0, 1)
    for (mean, found), both in ((running, right), (filled, right_filled)):
        # To twice the precision: in float32 alone, 1e4 is off by 5e-4.
        np.testing.assert_allclose(exact(mean), both[:, 0], rtol=0, atol=8 * ULP)
        np.testing.assert_allclose(found, both[:, 1], rtol=8 * ULP)
    weights = -np.expm1(np.arange(1, steps + 1) * np.log(momentum))
    np.testing.assert_allclose(weight, weights, rtol=4 * ULP)


def test_all_weight_goes_to_the_batches():
    """After 2e7 steps at 0.999999 a weight in float32 was 0.957."""
    momentum, batch = 0.999999, Moments.of(f32([5.0]), f32([2.0]))
    start = strategies.Running.loaded(batch.mean, batch.variance, 2e7)
    after = pushed(start, batch, momentum, 3)
    assert after.weight(momentum) == 1
    other = at_step(3, Moments.of(f32([6.0]), f32([9.0])))
    used, after = SmoothStart(momentum).update(other, after)
    np.testing.assert_array_equal(used.mean_pair.parts, after.mean_pair.parts)


@each_strategy
@pytest.mark.parametrize("momentum", [*MOMENTA, 0.1, 1 / 3, 0.7, 0.9])
def test_the_first_batch_is_remembered_to_the_bit_and_stays(momentum, strategy):
    random = np.random.RandomState(2)
    mean = f32(1e3 * random.standard_normal(99))
    rest = mean * f32(random.uniform(-1, 1, 99) * ULP / 4)  # what rounding may leave out
    first = Moments(f32(7), Pair.of(mean, rest), f32(random.uniform(0, 1, 99)))
    strategy = strategy(momentum)
    memory, update = strategy.init(99, jnp.float32), jax.jit(strategy.update)
    for step in range(50):
        used, memory = update(at_step(step, first), memory)
        for moments in (used, strategy.infer(memory)):
            np.testing.assert_array_equal(moments.mean_pair.parts, first.mean_pair.parts)
            np.testing.assert_array_equal(moments.variance, first.variance)


def test_a_momentum_near_0_forgets_what_it_should_and_no_more():
    """r + share (b - r) cancels: 4% of the variance."""
    running = strategies.Running.empty(1, jnp.float32)
    for variance in (1e6, 1.0):
        running = running.push(Moments.of(f32([0.0]), f32([variance])), 1e-6)
    right = (1e-6 * 1e6 + 1) / (1 + 1e-6)
    np.testing.assert_allclose(running.variance, [right], rtol=4 * ULP)


@pytest.mark.parametrize("momentum", [0.99, 0.9999])
def test_an_average_does_not_come_to_a_halt(momentum):
    """In float32 alone the variance stops at 3e-6 of itself, at 0.99, and at 3e-4."""
    running = strategies.Running.loaded(f32([0.0]), f32([1.0]))
    batch = Moments.of(f32([0.0]), f32([1.001]))
    running = pushed(running, batch, momentum, round(20 / (1 - momentum)))
    np.testing.assert_allclose(running.variance, batch.variance, rtol=ULP)
