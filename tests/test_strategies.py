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

from .helpers import at_step, call, f32, make, normal

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


MOMENTA = (1e-6, 0.5, 0.99, 0.9999, 0.999999)
each_momentum = pytest.mark.parametrize("momentum", MOMENTA)
ULP = float(np.finfo(np.float32).eps)


@each_momentum
@pytest.mark.parametrize(("strategy", "golden"), CASES, ids=IDS)
def test_equals_its_formula(strategy, golden, momentum):
    strategy = strategy(momentum)
    memory = strategy.init(CHANNELS, jnp.float32)
    update = jax.jit(strategy.update)
    history = batches(40)
    for step, ((mean, variance), (train, infer)) in enumerate(
        zip(history, golden(history, momentum), strict=True)
    ):
        batch = at_step(step, Moments.of(f32(mean), f32(variance)))
        used, memory = update(batch, memory)
        for ours, right in ((used, train), (strategy.infer(memory), infer)):
            # Roundings do not add up: what is left are those of one step, of the parts, and of
            # the batches to float32, on the scale of the largest of them.
            scale = np.max([[abs(m), v] for m, v in history], axis=0)
            np.testing.assert_allclose(
                [ours.mean, ours.variance] / scale, right / scale, atol=4 * ULP
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
    # A statistic that does not change stays as it is.
    assert (strategy.infer(after).mean, strategy.infer(after).variance) == (3, 4)
    assert after.weight == 1


def test_clipping_leaves_a_batch_within_the_bounds_as_it_was():
    clip, plain = VarianceClip(Batch(0.9), start=1), Batch(0.9)
    clipped, memory = clip.init(1, jnp.float32), plain.init(1, jnp.float32)
    for step, variance in enumerate((1.1, 0.37, 2.9, 3.3)):
        batch = at_step(step, Moments(f32(7), f32([0.1]), f32([7 * variance])))
        used, clipped = clip.update(batch, clipped)
        right, memory = plain.update(batch, memory)
        jax.tree.map(np.testing.assert_array_equal, used, right)
        jax.tree.map(np.testing.assert_array_equal, clipped, memory)


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
    for step in range(batches):
        _, memory = strategy.update(of_variance(G, step), memory)
    np.testing.assert_allclose(strategy.infer(memory).variance, G, rtol=1e-6)
    return memory


def of_variance(variance, step, eps=1e-5):
    m2 = f32(8 * np.asarray(variance))
    return at_step(step, Moments(f32(8), f32([1.0, -2.0, 0.0]), m2), eps)


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
    used, memory = clip.update(of_variance(variance, 3), settled(clip, 3))
    right, right_memory = wrapped.update(of_variance(within, 3), settled(wrapped, 3))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6)
    jax.tree.map(close, used, right)
    # On the scale of a statistic are its rest, and the rest of a mean of 0.
    jax.tree.map(functools.partial(close, atol=2e-6), memory, right_memory)
    jax.tree.map(close, clip.infer(memory), wrapped.infer(right_memory))


@pytest.mark.parametrize("wrapped", WRAPPED, ids=repr)
def test_clipping_starts_after_so_many_batches(wrapped):
    clip = VarianceClip(wrapped, ratio=2.0, start=3)
    for batches in (2, 3):
        corrupted = of_variance(1e6 * G, batches)
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


# --- Roundings do not add up, and no average comes to a halt.


@each_momentum
def test_thousands_of_steps(momentum):
    """Of all recursions; the other strategies normalise by these."""
    steps = 3000
    random = np.random.RandomState(1)
    mean = (1e4 + random.standard_normal((steps, CHANNELS))).astype(np.float32)
    variance = random.uniform(0.5, 2, (steps, CHANNELS)).astype(np.float32)

    @jax.jit
    def average(mean, variance):
        def step(running, batch):
            running = running.push(Moments.of(*batch), momentum)
            both = running.moments, running.fill(Moments.of(*batch))
            found = [(used.mean, used.mean_rest, used.variance) for used in both]
            return running, (*found, running.weight)

        empty = strategies.Running.empty(CHANNELS, jnp.float32)
        return jax.lax.scan(step, empty, (mean, variance))[1]

    running, filled, weight = average(mean, variance)
    golden = golden_smooth_start(zip(*map(np.float64, (mean, variance)), strict=True), momentum)
    right_filled, right = np.swapaxes(list(golden), 0, 1)
    for (high, low, found), exact in ((running, right), (filled, right_filled)):
        # To twice the precision: in float32 alone, 1e4 is off by 5e-4.
        np.testing.assert_allclose(
            np.float64(high) + np.float64(low), exact[:, 0], rtol=0, atol=8 * ULP
        )
        np.testing.assert_allclose(found, exact[:, 1], rtol=8 * ULP)
    exact = -np.expm1(np.arange(1, steps + 1) * np.log(momentum))
    np.testing.assert_allclose(weight, exact, rtol=4 * ULP)


@pytest.mark.parametrize("left", [0.6, 0.4, 1e-3, 1e-6, 4e-8, 1e-12])
@each_momentum
def test_what_is_left_goes_to_nothing(momentum, left):
    """After 2e7 steps the weight was 0.957 at 0.999999, and `smooth_start` kept the rest."""
    steps = 1000 if momentum > 0.99 else 3
    weight = np.float32(1 - left)
    rest = np.float32(1 - np.float64(weight) - left)
    start = strategies.Running(f32([5.0]), f32([2.0]), f32(weight), weight_rest=f32(rest))
    batch = Moments.of(f32([5.0]), f32([2.0]))

    @jax.jit
    def run(running):
        step = lambda _, running: running.push(batch, momentum)  # noqa: E731
        return jax.lax.fori_loop(0, steps, step, running)

    after = run(start)
    found = (1 - np.float64(after.weight)) - np.float64(after.weight_rest)
    exact = left * momentum**steps
    assert found < left
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-12)
    if exact < 2**-26:
        assert after.weight == 1
        other = Moments.of(f32([1e6]), f32([9.0]))
        used = after.fill(other)
        assert (used.mean, used.variance) == (5, 2)


@pytest.mark.parametrize("strategy", [Batch, Ema, Adam, SmoothStart])
@pytest.mark.parametrize("momentum", [*MOMENTA, 0.1, 1 / 3, 0.7, 0.9])
def test_the_first_batch_is_remembered_to_the_bit_and_stays(momentum, strategy):
    random = np.random.RandomState(2)
    mean = f32(1e3 * random.standard_normal(99))
    rest = mean * f32(random.uniform(-1, 1, 99) * ULP / 4)  # what rounding may leave out
    first = Moments(f32(7), mean, f32(random.uniform(0, 1, 99)), rest)
    strategy = strategy(momentum)
    memory, update = strategy.init(99, jnp.float32), jax.jit(strategy.update)
    for step in range(50):
        used, memory = update(at_step(step, first), memory)
        for moments in (used, strategy.infer(memory)):
            np.testing.assert_array_equal(moments.mean, first.mean)
            np.testing.assert_array_equal(moments.mean_rest, first.mean_rest)
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
    steps = round(20 / (1 - momentum))
    step = lambda _, running: running.push(batch, momentum)  # noqa: E731
    running = jax.jit(lambda r: jax.lax.fori_loop(0, steps, step, r))(running)
    np.testing.assert_allclose(running.variance, batch.variance, rtol=ULP)


# --- Clipping, and batches that say nothing.


def outputs_after(quiet, batches=60, channels=3):
    """The standard deviations of each channel's output after 210 quiet batches."""
    layer, state = make(channels, "batch", approach="variance_clip")
    noise = normal(0, (210 + batches, 64, channels))
    scale = jnp.where(jnp.arange(210 + batches)[:, None, None] < 210, quiet, 1)

    def step(state, x):
        y, state = call(layer, state, x)
        return state, y.std(0)

    _, deviations = jax.jit(lambda s: jax.lax.scan(step, s, noise * scale))(state)
    return np.asarray(deviations[210:])


@pytest.mark.parametrize("quiet", [0.0, 1e-30, 1e-15, 1e-3], ids=str)
def test_clipping_comes_back_from_constants(quiet):
    """A last layer that starts at 0 makes 200 constant batches: the bounds were [0, 0] for
    ever, and outputs of a standard deviation of 334."""
    deviations = outputs_after(f32(quiet))
    # One batch leaves g = 1/211 or more, and clips the next to 4 (g + g).
    assert deviations.max() < (8 / 230) ** -0.5
    np.testing.assert_allclose(deviations[0], 1, atol=0.01)
    np.testing.assert_allclose(deviations[-1], 1, atol=0.01)


def test_a_dead_channel_among_live_ones_comes_back():
    deviations = outputs_after(f32([0.0, 1.0, 1.0]), batches=5)
    np.testing.assert_allclose(deviations, 1, atol=0.01)


@pytest.mark.parametrize(("eps", "clips"), [(3.9, True), (4.1, False)])
def test_below_eps_a_running_variance_says_nothing(eps, clips):
    """The mean of G is 4."""
    clip = VarianceClip(Batch(0.9), ratio=4.0, start=3)
    used, _ = clip.update(of_variance(1e6 * G, 3, eps), settled(clip, 3))
    np.testing.assert_allclose(used.variance, 4 * (G + 4) if clips else 1e6 * G, rtol=2e-6)
