"""The layer is as exact as its arithmetic allows, where that is hard.

The bounds are a few roundings of the dtype that is calculated in, whatever the mean and the
number of values: of float32, one is 6e-8. The same cases as in `experiments.accuracy`, with
fresh seeds, small and prime numbers of values, masks, and float64.
"""

import functools
from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab import exact
from experiments.lab.exact import EPS, Answer, Batch

from .helpers import bits, make

BOUNDS = {"y": 1e-6, "variance": 5e-7, "dx": 1e-6, "dweight": 1e-7, "dbias": 2e-7}
MEAN_ULPS = 4
# dweight = rstd * sum(dy (x - mean)). By the bound of the variance alone, rstd may be off by
# half of that; its root, its division and the product are three more roundings.
DWEIGHT_OF_ITSELF = BOUNDS["variance"] / 2 + 3 * 2**-24
FEW = 121

# Each is compiled once, whatever the seed.
PLAIN = ((1, 8), (2, 8), (7, 8), (9, 8), (10, 8), (64, 8), (121, 8), (1000, 8))
SPATIAL = ((10, 8, 10), (16, 4, 7, 7), (8, 3, 16, 16), (16, 8, 8, 8))
# Few channels side by side, prime numbers, and a million values a channel.
LARGE = ((4001, 3), (509, 2, 31), (1_000_000, 2), (1000, 2, 1000))

seeds = st.integers(0, 2**32 - 1)
each_shape = pytest.mark.parametrize("shape", PLAIN + SPATIAL, ids=str)
few_examples = hypothesis.settings(max_examples=8)


@functools.partial(jax.jit, static_argnums=5)
def train(weight, bias, x, dy, mask, implementation="auto"):
    """One training step: output, remembered mean and variance, and the gradients."""
    layer, state = make(
        x.shape[1], "batch", eps=EPS, approach="batch", implementation=implementation
    )

    def forward(weight, bias, x):
        affine = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))

        def one(x, mask):
            return affine(x, state, mask=mask)

        y, after = jax.vmap(one, axis_name="batch", out_axes=(0, None))(x, mask)
        return y, after.get(layer.memory_index)

    y, pull_back, memory = jax.vjp(forward, weight, bias, x, has_aux=True)
    return y, memory.mean, memory.variance, *pull_back(dy)


def make_batch(random, x, *, affine=True, sum_of_y=False):
    """Weight and bias at random, and the gradient of y: of its sum, or at random."""
    dy = np.ones(x.shape) if sum_of_y else random.standard_normal(x.shape)
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    channels = x.shape[1]
    weight = random.uniform(0.5, 1.5, channels) if affine else np.ones(channels)
    bias = random.uniform(-1, 1, channels) if affine else np.zeros(channels)
    return Batch(x, dy.astype(x.dtype), weight.astype(dtype), bias.astype(dtype))


def check(batch, mask=None, scale=1.0, implementation="auto"):
    """Every quantity within its bound; `scale` is the ulp's, relative to float32."""
    y, mean, variance, dweight, dbias, dx = map(
        np.asarray, train(batch.weight, batch.bias, batch.x, batch.dy, mask, implementation)
    )
    counts = np.ones(y.shape[:1] + y.shape[2:], bool) if mask is None else mask

    def counted(values):
        """[n, C]: what counts, in no other order."""
        return np.moveaxis(values, 1, -1)[counts]

    for values in (y, dx):
        assert values.dtype == batch.x.dtype
        assert not np.moveaxis(values, 1, -1)[~counts].any()
    flat = batch._replace(x=counted(batch.x), dy=counted(batch.dy))
    # All but the mean are the same for shifted values, and those 64 bits hold exactly.
    first = flat.x[:1].astype(np.longdouble)
    shifted = flat.x.astype(np.longdouble) - first
    right = exact.batch_norm(flat._replace(x=shifted))
    answer = Answer(counted(y), variance, counted(dx), dweight, dbias)
    found = exact.errors(flat, right, answer)._asdict()
    assert found.pop("nonfinite") == 0
    if len(flat.x) <= FEW:
        # With few values dweight is as large as sum |dy|, and rstd, a rounded root, is off by
        # more than 1e-7 of itself: so by what the rounding of rstd costs, and no more.
        sum_dy = np.abs(flat.dy.astype(np.longdouble)).sum(0)
        own = np.abs(right.answer.dweight) * DWEIGHT_OF_ITSELF * scale
        off = np.abs(dweight - right.answer.dweight) - own
        found["dweight"] = np.max(off / sum_dy)
    over = {name: error for name, error in found.items() if error > scale * BOUNDS[name]}
    assert not over, over
    # A mean near 0 is what is left of sums of numbers as large as the standard deviation.
    largest = np.maximum(np.abs(first[0] + shifted.mean(0)), np.sqrt(right.answer.variance))
    ulps = np.abs(mean - (first[0] + shifted.mean(0))) / np.spacing(largest.astype(mean.dtype))
    assert np.max(ulps) <= MEAN_ULPS


def by_channel(values, ndim):
    return np.reshape(values, (1, -1) + (1,) * (ndim - 2))


def far_from_zero(random, shape, dtype: Any = np.float32):
    """Every channel of another mean and standard deviation; mean/std from 1 to 1e7."""
    channels = shape[1]
    std = 10 ** random.uniform(-1.5, 1.5, channels)
    ratio = 10 ** random.uniform(0, 7, channels) * random.choice([-1, 1], channels)
    std, ratio = (by_channel(values, len(shape)) for values in (std, ratio))
    return (std * (ratio + random.standard_normal(shape))).astype(dtype)


def with_outlier(random, shape, place, dtype: Any = np.float32):
    """One value in each channel is 1e6."""
    x = random.standard_normal(shape)
    place = np.unravel_index(place, shape[:1] + shape[2:])
    x[(place[0], slice(None), *place[1:])] = 1e6
    return x.astype(dtype)


@each_shape
@hypothesis.given(seeds)
@few_examples
def test_means_far_from_zero(shape, seed):
    random = np.random.default_rng(seed)
    check(make_batch(random, far_from_zero(random, shape)))


@pytest.mark.parametrize("ratio", [1, 1e3, 1e5, 1e7])
@hypothesis.given(seeds)
@few_examples
def test_ratios_of_mean_and_deviation(ratio, seed):
    random = np.random.default_rng(seed)
    x = (ratio + random.standard_normal((1000, 8))).astype(np.float32)
    check(make_batch(random, x, affine=False))


@pytest.mark.parametrize("shape", LARGE, ids=str)
@hypothesis.given(seeds)
@hypothesis.settings(max_examples=2)
def test_many_values(shape, seed):
    random = np.random.default_rng(seed)
    x = (1e3 + random.standard_normal(shape)).astype(np.float32)
    check(make_batch(random, x, affine=False))


@pytest.mark.parametrize("shape", PLAIN[1:] + SPATIAL, ids=str)
@hypothesis.given(seeds, st.data())
@few_examples
def test_an_outlier(shape, seed, data):
    """In first place, where a shift by the first value is worst; and elsewhere."""
    n = np.prod(shape) // shape[1]
    random = np.random.default_rng(seed)
    for place in (0, data.draw(st.integers(1, int(n) - 1))):
        check(make_batch(random, with_outlier(random, shape, place), affine=False))


@each_shape
@hypothesis.given(seeds)
@few_examples
def test_the_gradient_of_a_sum_is_nothing(shape, seed):
    """The sum of y does not depend on x: what is left is rounding, and held as any dx."""
    random = np.random.default_rng(seed)
    check(make_batch(random, far_from_zero(random, shape), sum_of_y=True))


def test_the_pair_of_oneflow_6149():
    """https://github.com/Oneflow-Inc/oneflow/issues/6149"""
    x = np.array([[-1.83965693], [-1.82964566]], np.float32)
    random = np.random.default_rng(0)
    assert EPS == 1e-5
    check(make_batch(random, x, affine=False, sum_of_y=True))


# Every 32-bit number in the range may come, also those that no decimal writes shortly.
constants = st.lists(
    st.floats(float(np.float32(1e-3)), 65504, width=32), min_size=8, max_size=8
)


def check_constants(constants, shape, mask, activation=None, dtype: Any = np.float32):
    weight, bias = np.linspace(0.5, 1.5, 8), np.linspace(-2, 2, 8)
    values = by_channel(np.asarray(constants), len(shape)).astype(dtype)
    y, variance = of_constant(
        np.float32(weight), np.float32(bias), np.broadcast_to(values, shape), mask, activation
    )
    assert bits(variance) == bits(np.zeros(8, np.float32))
    right = jnp.asarray(bias, jnp.float32)
    right = (right if activation is None else activation(right)).astype(dtype)
    right = np.broadcast_to(by_channel(np.asarray(right), len(shape)), shape)
    if mask is not None:
        right = np.where(mask.reshape(shape[0], 1, *shape[2:]), right, 0)
    assert (np.asarray(y) == right).all()


@eqx.filter_jit
def of_constant(weight, bias, x, mask, activation):
    layer, state = make(8, "batch", eps=EPS, approach="batch", activation=activation)
    layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))

    def one(x, mask):
        return layer(x, state, mask=mask)

    y, after = jax.vmap(one, axis_name="batch", out_axes=(0, None))(x, mask)
    return y, after.get(layer.memory_index).variance


@pytest.mark.parametrize("activation", [None, jax.nn.relu], ids=["plain", "relu"])
@pytest.mark.parametrize("n", [7, 9, 121])
@hypothesis.given(constants)
def test_a_constant_gives_the_bias_to_the_bit(n, activation, constants):
    """https://github.com/BVLC/caffe/issues/3963: 1/n, rounded, is another mean."""
    check_constants(constants, (n, 8), None, activation)


@hypothesis.given(st.integers(1, 2000), constants)
@hypothesis.settings(max_examples=10)
def test_of_any_number_of_values(n, constants):
    check_constants(constants, (n, 8), None)


@pytest.mark.parametrize("shape", [(7, 8), (121, 8), (8, 8, 5, 5)], ids=str)
@pytest.mark.parametrize("third", [False, True], ids=["none out", "a third out"])
@hypothesis.given(constants)
@few_examples
def test_under_a_mask(shape, third, constants):
    check_constants(constants, shape, make_mask(shape, third), jax.nn.relu)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@hypothesis.given(constants)
@few_examples
def test_in_half_precision(dtype, constants):
    check_constants(constants, (7, 8), None, dtype=jnp.dtype(dtype))


def make_mask(shape, third):
    """All of them, or without the first, the fourth and so on."""
    number = np.arange(np.prod(shape) // shape[1]).reshape(shape[0], *shape[2:])
    return number % 3 != 0 if third else number >= 0


@pytest.mark.parametrize("third", [False, True], ids=["none out", "a third out"])
@pytest.mark.parametrize("shape", [(7, 8), (64, 8), (1000, 8), *SPATIAL], ids=str)
@hypothesis.given(seeds)
@few_examples
def test_masked(shape, third, seed):
    """With a NaN wherever it does not count."""
    random = np.random.default_rng(seed)
    mask = make_mask(shape, third)
    batch = make_batch(random, far_from_zero(random, shape))
    np.moveaxis(batch.x, 1, -1)[~mask] = np.nan
    check(batch, mask)
    if not third:
        check(make_batch(random, with_outlier(random, shape, 0), affine=False), mask)


@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [(jnp.float16, 300, 1), (jnp.float16, 0, 300), (jnp.bfloat16, 100, 1)],
)
@pytest.mark.parametrize("shape", [(64, 8), (16, 4, 7, 7)], ids=str)
@hypothesis.given(seeds)
@few_examples
def test_half_precision(shape, dtype, mean, std, seed):
    """The same bounds, and half an ulp of the dtype for the rounding of the result."""
    random = np.random.default_rng(seed)
    x = (mean + std * random.standard_normal(shape)).astype(jnp.dtype(dtype))
    check(make_batch(random, x, affine=False))


@pytest.mark.parametrize("shape", [(2, 8), (7, 8), (64, 8), (1000, 8), (10, 8, 10)], ids=str)
@hypothesis.given(seeds)
@few_examples
def test_double_precision(shape, seed):
    """29 bits more, and bounds as much smaller."""
    random = np.random.default_rng(seed)
    n = np.prod(shape) // shape[1]
    with jax.enable_x64(True):
        for x in (
            far_from_zero(random, shape, np.float64),
            with_outlier(random, shape, 0, np.float64),
            with_outlier(random, shape, n - 1, np.float64),
        ):
            check(make_batch(random, x), scale=2.0**-29)


@pytest.mark.parametrize("shape", [(7, 8), (1000, 8), (16, 4, 7, 7)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@hypothesis.given(seeds, st.data())
@few_examples
def test_what_is_not_finite_stays_in_its_channel(shape, bad, seed, data):
    random = np.random.default_rng(seed)
    batch = make_batch(random, far_from_zero(random, shape))
    place = [data.draw(st.integers(0, size - 1)) for size in shape]
    spoilt = batch.x.copy()
    spoilt[tuple(place)] = bad
    others = np.arange(shape[1]) != place[1]
    results = []
    for x in (batch.x, spoilt):
        y, _, _, dweight, dbias, dx = train(batch.weight, batch.bias, x, batch.dy, None)
        results.append((np.asarray(y), np.asarray(dx), dweight[None], dbias[None]))
    for without, with_bad in zip(*results, strict=True):
        assert bits(without[:, others]) == bits(with_bad[:, others])
    assert not np.isfinite(results[1][0][:, place[1]]).any()
