"""Tests that each strategy equals its recursion, and that roundings do not accumulate."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.strategies import Adam, Batch, Ema, Moments, Pair, Running, SmoothStart
from tests.helpers import at_step, exact, f32

from .recursions import STRATEGIES, Memory, number, reference, value
from .recursions import Moments as Numbers

pytestmark = pytest.mark.x32  # averages are float32, whatever the default
C = 3
ULP = float(np.finfo(np.float32).eps)
# Below a momentum of 0.5 the running average starts from the batch.
CASES = [
    ("batch", 0.3),
    ("ema", 0.99),
    ("ema", 0.3),
    ("adam", 0.999999),
    ("smooth_start", 0.5),
    ("smooth_start", 0.999999),
    ("renorm", 0.99),
    ("clip", 0.99),
    ("average", 0.5),
    ("cumulative", 0.5),
    ("accumulated", 0.3),
]


@functools.partial(jax.jit, static_argnums=0)
def trained(strategy, memory, batches):
    """Returns the moments that normalise each batch, and those of inference afterwards."""

    def push(memory, step_and_batch):
        used, memory = strategy.update(at_step(*step_and_batch), memory)
        return memory, (used, strategy.infer(memory))

    steps = jnp.arange(len(batches.m2))
    return jax.lax.scan(push, memory, (steps, batches))[1]


@pytest.mark.parametrize(("approach", "momentum"), CASES)
def test_strategy_equals_its_recursion(approach, momentum):
    random = np.random.RandomState(0)
    size = np.array([1e-2, 1.0, 1e2])  # channels of very different size
    means = size * random.standard_normal((40, C))
    variances = size**2 * random.uniform(0.1, 10, (40, C))
    strategy = STRATEGIES[approach](momentum)
    batches = jax.vmap(Moments.of)(f32(means), f32(variances), np.ones(40))
    both = trained(strategy, strategy.init(C, jnp.float32), batches)
    actual = np.array([[moments.mean, moments.variance] for moments in both])
    settings = {"eps": 1e-5, "unbiased": False, "spatial": ()}
    case = types.SimpleNamespace(approach=approach, momentum=momentum, **settings)
    memory, expected = Memory.empty(C, 1), []
    for mean, variance in np.stack([means, variances], 1)[..., None]:
        batch = Numbers(np.ones((C, 1)), number(mean), number(variance))
        used, memory = reference(case, memory, batch)
        expected.append([list(map(value, each[1:])) for each in (used, memory.running)])
    # Roundings do not accumulate: the bound is the rounding of one step, its two weights and
    # the batches to float32, on the scale of the largest batch.
    scale = np.max([np.abs(means), variances], axis=1)[:, None]
    errors = actual - np.moveaxis(np.array(expected)[..., 0], 0, 2)
    assert np.abs(errors / scale).max() <= 4 * ULP


@pytest.mark.parametrize("momentum", [0.3, 0.99, 0.999999])
def test_running_averages_over_thousands_of_steps(momentum):
    """Checks both averages of `Running`, which all strategies use for normalisation."""
    steps = np.arange(1, 3001)
    random = np.random.RandomState(1)
    means = f32(1e4 + random.standard_normal((len(steps), C)))
    variances = f32(random.uniform(0.5, 2, (len(steps), C)))
    strategy = SmoothStart(momentum)
    batches = jax.vmap(Moments.of)(means, variances, np.ones(3000))
    both = trained(strategy, strategy.init(C, jnp.float32), batches)
    weights = -np.expm1(steps * np.log(momentum))
    h, expected = np.zeros((2, C)), []
    for b, weight in zip(np.stack([means, variances], 1).astype(float), weights, strict=True):
        h = momentum * h + (1 - momentum) * b
        expected.append((h + (1 - weight) * b, h / weight))
    expected = np.array(expected)
    for i, moments in enumerate(both):
        # Means have twice the precision: in float32 alone, 1e4 is off by 5e-4.
        mean = exact(moments.mean_pair)
        np.testing.assert_allclose(mean, expected[:, i, 0], rtol=0, atol=8 * ULP)
        np.testing.assert_allclose(moments.variance, expected[:, i, 1], rtol=8 * ULP)
    running = Running.empty(C, jnp.float32)._replace(batches=f32(steps))
    np.testing.assert_allclose(running.weight(momentum), weights, rtol=4 * ULP)


@pytest.mark.parametrize(
    "strategy", [Batch(0.999999), Ema(1 / 3), Adam(1 / 3), SmoothStart(0.99)], ids=repr
)
def test_repeated_first_batch_is_remembered_to_the_bit(strategy):
    random = np.random.RandomState(2)
    mean = f32(1e3 * random.standard_normal(99))
    rest = mean * f32(random.uniform(-1, 1, 99) * ULP / 4)  # what the mean's rounding may lose
    first = Moments(f32(7), Pair.of(mean, rest), f32(random.uniform(0, 1, 99)))
    empty = strategy.init(99, jnp.float32)
    # Of earlier versions the empty memory was 0.
    for memory in (empty, jax.tree.map(jnp.zeros_like, empty)):
        identity = strategy.infer(memory)
        assert (identity.mean == 0).all() & (identity.variance == 1).all()
        batches = jax.tree.map(lambda leaf: jnp.stack([leaf] * 50), first)
        for moments in trained(strategy, memory, batches):
            every = np.broadcast_to(first.mean_pair.parts, (50, 2, 99))
            np.testing.assert_array_equal(moments.mean_pair.parts, every)
            np.testing.assert_array_equal(moments.variance, [first.variance] * 50)


@pytest.mark.parametrize(("momentum", "given"), [(0.75, float), (1e-6, f32)])
def test_running_averages_of_two_batches(momentum, given):
    """Fails for an array of a schedule, and if r + share (b - r) cancels: near a momentum of 0
    that loses 4% of the variance."""
    m, running = given(momentum), Running.empty(1, jnp.float32)
    for variance in (1e6, 1.0):
        running = running.push(Moments.of(f32([0.0]), f32([variance])), m)
    expected = (momentum * 1e6 + 1) / (1 + momentum)
    np.testing.assert_allclose(running.variance, [expected], rtol=4 * ULP)
