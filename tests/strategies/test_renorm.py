"""Tests Batch Renormalisation, https://arxiv.org/abs/1702.03275, beside the paper's formulas.

And what four implementations that people use make of them.
"""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.strategies import Batch, Moments, Ramp, Renorm
from tests.helpers import at_step, call, call_and_grad, copy, f32, make, normal, remember, same

pytestmark = pytest.mark.x32  # its bounds are float32's
C, MOMENTUM = 3, 0.9
# Closed, half open and open within a dozen steps.
SHORT = Renorm(MOMENTUM, Ramp(1, 3, 2, 9), Ramp(0, 5, 2, 6))


WEIGHT, BIAS = np.array([0.5, -2.0, 1.5]), np.array([0.25, 1.0, -0.75])


def paper(history, r_max, d_max, eps):
    """Yields the normalised x, the gradients of sum(y * dy) in x, weight and bias, and the
    running mean and variance, for each (x, dy)."""
    average, weight = np.zeros((2, C)), 0.0
    for step, (x, dy) in enumerate(history):
        x, dy = (np.asarray(a, np.float64) for a in (x, dy))
        mean, variance = x.mean((0, 2)), x.var((0, 2))
        mu, sigma2 = average / weight if step else (mean, variance)
        sigma_b, sigma = np.sqrt(variance + eps), np.sqrt(sigma2 + eps)
        r_most, d_most = (float(bound(jnp.int32(step))) for bound in (r_max, d_max))
        r = np.clip(sigma_b / sigma, 1 / r_most, r_most)[:, None]
        d = np.clip((mean - mu) / sigma, -d_most, d_most)[:, None]
        xhat = (x - mean[:, None]) / sigma_b[:, None]
        average = MOMENTUM * average + (1 - MOMENTUM) * np.array([mean, variance])
        weight = MOMENTUM * weight + (1 - MOMENTUM)
        g = dy * r * WEIGHT[:, None]
        mean_g, mean_gx = (a.mean((0, 2))[:, None] for a in (g, g * xhat))
        dx = (g - mean_g - xhat * mean_gx) / sigma_b[:, None]
        y = xhat * r + d
        yield y, (dx, (dy * y).sum((0, 2)), dy.sum((0, 2))), average / weight


@pytest.mark.parametrize(("ratio", "eps"), [(1, 1e-5), (1e6, 0.1)])
def test_is_the_paper_s_in_every_phase(ratio, eps):
    layer, state = make(C, "batch", eps=eps, approach=SHORT)
    layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (f32(WEIGHT), f32(BIAS)))
    history = [
        (
            normal(step, (6, C, 4), ratio + 3 * np.sin(step), 1 + step % 4),
            normal(99 + step, (6, C, 4)),
        )
        for step in range(14)
    ]
    formula = paper(history, SHORT.r_max, SHORT.d_max, eps)
    shifts = []
    for (x, dy), (y, (dx, dweight, dbias), running) in zip(history, formula, strict=True):
        mean, variance = running
        ours, state, (gradient, our_dx) = call_and_grad(layer, state, x, dy)
        scale = np.maximum(1, np.abs(y)) * np.abs(WEIGHT)[:, None]
        affine = y * WEIGHT[:, None] + BIAS[:, None]
        np.testing.assert_allclose(ours / scale, affine / scale, rtol=0, atol=1e-6)
        np.testing.assert_allclose(our_dx, dx, rtol=0, atol=1e-6 * np.abs(dy).max() * 6)
        total = 1e-6 * np.abs(dy).sum((0, 2)).max()
        np.testing.assert_allclose(gradient.weight, dweight, rtol=0, atol=total * scale.max())
        np.testing.assert_allclose(gradient.bias, dbias, rtol=0, atol=total)
        shifts.append(np.abs(y.mean((0, 2))).max())
        inferred, _ = call(eqx.nn.inference_mode(layer), copy(state), x)
        right = (np.float64(x) - mean[:, None]) / np.sqrt(variance + eps)[:, None]
        scale = np.maximum(1, np.abs(right)) * np.abs(WEIGHT)[:, None]
        right = right * WEIGHT[:, None] + BIAS[:, None]
        np.testing.assert_allclose(inferred / scale, right / scale, rtol=0, atol=1e-6)
    assert max(shifts[:3]) < 1e-9 < 0.5 < max(shifts[6:])  # closed, then open


CLOSED = [Renorm(MOMENTUM), Renorm.crossq(MOMENTUM), Renorm(MOMENTUM, r_max=1.0, d_max=0.0)]


@pytest.mark.parametrize("approach", CLOSED, ids=str)
def test_closed_is_batch_to_the_bit(approach):
    scale = f32([[1e-3], [1.0], [30.0]])
    given = 1e4 + scale * normal(0, (6, C, 4)), normal(1, (6, C, 4))
    outcomes = []
    for each in (approach, Batch(MOMENTUM)):
        layer, state = make(C, "batch", approach=each)
        _, state = call(layer, state, normal(2, (6, C, 4)))  # the memory is far away
        y, state, (gradient, dx) = call_and_grad(layer, state, *given)
        outcomes.append((y, gradient.weight, gradient.bias, dx, state))
    assert same(*outcomes)


def test_the_first_batch_is_corrected_towards_nothing():
    layer, state = make(C, "batch", approach=Renorm(r_max=3.0, d_max=5.0))
    plain, fresh = make(C, "batch", approach="batch")
    x = normal(0, (6, C, 4), 100, 7)
    assert same(call(layer, state, x), call(plain, fresh, x))


@pytest.mark.parametrize("steps", [0, 3, 12])
def test_a_constant_channel_gives_the_bias_and_finite_gradients(steps):
    layer, state = make(C, "batch", approach=SHORT)
    layer = eqx.tree_at(lambda m: m.bias, layer, f32([0.3, -1, 2]))
    x = jnp.broadcast_to(f32([[1e-3], [121.0], [65504.0]]), (7, C, 3))
    for _ in range(steps):
        _, state = call(layer, state, x)
    y, _, (gradient, dx) = call_and_grad(layer, state, x, normal(0, x.shape))
    np.testing.assert_array_equal(y, np.broadcast_to(layer.bias[:, None], x.shape))
    assert np.isfinite(dx).all()
    np.testing.assert_array_equal(gradient.weight, np.zeros(C))


def test_unclipped_training_is_inference_by_the_memory_before():
    """The aim of the paper: the network that is trained is the one that will be used."""
    layer, state = make(C, "batch", approach=Renorm(MOMENTUM, r_max=1e9, d_max=1e9))
    _, state = call(layer, state, normal(0, (6, C, 4)))
    x = normal(1, (6, C, 4), 2, 3)
    right, _ = call(eqx.nn.inference_mode(layer), copy(state), x)
    np.testing.assert_allclose(call(layer, state, x)[0], right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("bounds", "steps", "right"),
    [
        (
            Renorm(),
            (0, 5_000, 15_000, 40_000, 90_000),
            [(1, 0), (1, 0), (11 / 7, 2.5), (3, 5), (3, 5)],
        ),
        (Renorm.crossq(), (0, 99_999, 100_000, 2**31 - 1), [(1, 0), (1, 0), (3, 5), (3, 5)]),
    ],
)
def test_the_published_schedules(bounds, steps, right):
    found = [
        [bound(jnp.int32(step)) for bound in (bounds.r_max, bounds.d_max)] for step in steps
    ]
    np.testing.assert_allclose(found, right, rtol=1e-6)


def test_equal_schedules_are_one_program():
    assert Renorm() == Renorm(0.99, Ramp(1, 3, 5_000, 40_000), Ramp(0.0, 5.0, 5_000, 25_000))
    assert hash(Renorm()) == hash(Renorm(0.99)) != hash(Renorm.crossq())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r_max", 0.5),
        ("d_max", -1.0),
        ("r_max", jnp.nan),
        ("r_max", Ramp(0, 3, 1, 9)),
        ("d_max", Ramp(5, -5, 1, 9)),
    ],
)
def test_a_bound_that_makes_no_sense(name, value):
    quoted = re.escape(f"{name}={value!r}")
    with pytest.raises(ValueError, match=f"{quoted}.*or a function of the step"):
        Renorm(**{name: value})


def test_a_ramp_that_ends_before_it_begins():
    with pytest.raises(ValueError, match=r"begin=10 and finish=5.*begin= must be smaller"):
        Ramp(1, 3, 10, 5)


# --- What others compute, from their source.

NEAR, FAR = normal(0, (64, 1), 0.0, 0.03), normal(0, (64, 1), 0.5, 0.03)
OPEN = Renorm(MOMENTUM, r_max=3.0, d_max=5.0)


def sbx(x, mean, variance, eps, r_max=3.0, d_max=5.0):
    """https://github.com/araffin/sbx/blob/master/sbx/common/jax_layers.py, as in CrossQ."""
    mean_b, variance_b = x.mean(0), x.var(0)
    sigma_b, sigma = jnp.sqrt(variance_b + eps), jnp.sqrt(variance + eps)
    r = jnp.clip(jax.lax.stop_gradient(sigma_b / sigma), 1 / r_max, r_max)
    d = jnp.clip(jax.lax.stop_gradient((mean_b - mean) / sigma), -d_max, d_max)
    shifted = mean_b - d * jnp.sqrt(variance_b) / r  # without eps
    return (x - shifted) / jnp.sqrt(variance_b / r**2 + eps)  # with it


def renormed(x, mean, variance, eps, strategy=OPEN):
    """Returns y of a layer that remembers this mean and variance."""
    layer, state = make(1, "batch", eps=eps, approach=strategy)
    memory = strategy.load(Moments.of(f32([mean]), f32([variance])))
    return call(layer, remember(layer, state, memory), x)[0]


def test_sbx_and_crossq_shift_by_another_deviation_than_they_divide_by():
    variance = 1.2 * float(FAR.var())
    assert abs(sbx(FAR, 0.0, variance, 1e-3).mean() - 5) > 1
    np.testing.assert_allclose(renormed(FAR, 0.0, variance, 1e-3).mean(), 5, rtol=1e-5)


def test_sbx_and_crossq_have_nan_gradients_of_a_constant():
    x = jnp.full((8, 1), 0.5)

    def gradient(f):
        return jax.grad(lambda x: (f(x, 0.0, 1.0, 1e-3) ** 2).sum())(x)

    assert np.isnan(gradient(sbx)).all()
    assert np.isfinite(gradient(renormed)).all()


def test_torchrl_passes_its_bounds():
    """It discards what `clamp_max` returns:
    https://github.com/pytorch/rl/blob/main/torchrl/modules/models/batchrenorm.py"""
    x = 100 + 1e3 * NEAR
    y = np.asarray(renormed(x, 0.0, 1.0, 1e-5))
    assert abs(x.mean()) > 50  # is d, and the deviation r, if nothing bounds them
    assert x.std() > 10
    np.testing.assert_allclose([y.mean(), y.std()], [5, 3], rtol=1e-5)


def test_keras_starts_from_0_and_1_and_averages_deviations():
    """https://github.com/keras-team/keras/pull/22047"""
    batches = [normal(seed, (64, 1), 50, scale) for seed, scale in enumerate((1, 9))]
    mean, deviation = 0.0, 1.0
    for x in batches:
        mean = MOMENTUM * mean + (1 - MOMENTUM) * x.mean()
        deviation = MOMENTUM * deviation + (1 - MOMENTUM) * jnp.sqrt(x.var() + 1e-5)
    strategy, weights = OPEN, np.array([MOMENTUM, 1]) / (1 + MOMENTUM)
    memory = strategy.init(1, jnp.float32)
    for step, x in enumerate(batches):
        batch = at_step(step, Moments.of(x.mean(0), x.var(0)))
        _, memory = strategy.update(batch, memory)
    found = strategy.infer(memory)
    right = [weights @ [f(x) for x in batches] for f in (np.mean, np.var)]
    np.testing.assert_allclose([found.mean[0], found.variance[0]], right, rtol=1e-5)
    assert abs(mean - right[0]) > 30
    assert deviation**2 < right[1] / 5
