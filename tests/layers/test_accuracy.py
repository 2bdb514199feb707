"""Tests that both layers are as exact as their arithmetic allows, where that is hard.

The cases are those of `experiments.accuracy`, with fresh seeds, small and prime numbers of
values, masks, and float64.
"""

from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm
from tests.helpers import bits, make
from tests.layers.accuracy import (
    EPS,
    Case,
    by_channel,
    check,
    far_from_zero,
    make_batch,
    seeds,
    train,
    train_rows,
    with_outlier,
)

pytestmark = pytest.mark.x32  # has its own dtypes


def cases(*shapes):
    return [Case("BatchNorm", shape) for shape in shapes]


def rows(*shapes):
    return [Case("LayerNorm", shape) for shape in shapes]


# Each is compiled once, whatever the seed. Few values and many, powers of two and primes.
ONE = [*cases((1, 8)), *rows((8, 1))]
PLAIN = cases((2, 8), (7, 8), (9, 8), (10, 8), (64, 8), (121, 8), (1000, 8))
SPATIAL = cases((10, 8, 10), (16, 4, 7, 7), (8, 3, 16, 16), (16, 8, 8, 8))
ROWS = rows((8, 2), (8, 7), (8, 121), (8, 768), (8, 1009))
# Few channels side by side, prime numbers, and a million values a channel.
LARGE = cases((4001, 3), (509, 2, 31), (1_000_000, 2), (1000, 2, 1000))

few_examples = hypothesis.settings(max_examples=8)


def each(*cases):
    return pytest.mark.parametrize("case", cases, ids=str)


@each(*ONE, *PLAIN, *SPATIAL, *ROWS)
@hypothesis.given(seeds)
@few_examples
def test_means_far_from_zero(case, seed):
    """The sum of y does not depend on x: its gradient is rounding, and held as any dx."""
    random = np.random.default_rng(seed)
    for sum_of_y in (False, True):
        x = case.draw(random, far_from_zero)
        affine = case.layer == "BatchNorm" or not sum_of_y
        case.check(make_batch(random, x, affine=affine, sum_of_y=sum_of_y))


@each(*LARGE, *rows((2, 1_000_000)))
@hypothesis.given(seeds)
@hypothesis.settings(max_examples=2)
def test_many_values(case, seed):
    random = np.random.default_rng(seed)
    x = (1e3 + random.standard_normal(case.shape)).astype(np.float32)
    case.check(make_batch(random, x, affine=case.layer == "LayerNorm"))


@each(*PLAIN, *SPATIAL, *ROWS)
@hypothesis.given(seeds, st.data())
@few_examples
def test_an_outlier(case, seed, data):
    """Puts it first, where a shift by the first value is worst, and elsewhere."""
    random = np.random.default_rng(seed)
    for place in (0, data.draw(st.integers(1, case.values - 1))):
        x = case.draw(random, with_outlier, place)
        case.check(make_batch(random, x, affine=False))


def test_the_pair_of_oneflow_6149():
    """Both values come out right, and dx is 0: https://github.com/Oneflow-Inc/oneflow/issues/6149."""
    pair = [-1.83965693, -1.82964566]
    assert EPS == 1e-5
    x = np.array(pair, np.float32)[:, None]
    check(make_batch(np.random.default_rng(0), x, affine=False, sum_of_y=True))
    for dtype in (np.float32, np.float64):
        with jax.enable_x64(dtype == np.float64):
            x = jnp.asarray(pair, dtype)
            layer = LayerNorm(2, use_weight=False, use_bias=False)
            y, pull_back = jax.vjp(layer, x)
            half = np.asarray(x, np.longdouble)[1] / 2 - np.asarray(x, np.longdouble)[0] / 2
            right = half / np.sqrt(half**2 + np.longdouble(1e-5))
            np.testing.assert_allclose(y, [-float(right), float(right)], rtol=1e-6)
            assert float(f"{right:.4f}") == 0.8454
            (dx,) = pull_back(jnp.ones(2, dtype))
            assert (np.asarray(dx) == 0).all()


@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [(jnp.float16, 300, 1), (jnp.float16, 0, 300), (jnp.bfloat16, 100, 1)],
)
@each(*cases((64, 8), (16, 4, 7, 7)), *rows((8, 7), (8, 768)))
@hypothesis.given(seeds)
@few_examples
def test_half_precision(case, dtype, mean, std, seed):
    """The result may be off by half an ulp of its dtype more."""
    random = np.random.default_rng(seed)
    x = (mean + std * random.standard_normal(case.shape)).astype(jnp.dtype(dtype))
    case.check(make_batch(random, x, affine=False))


@each(*cases((2, 8), (7, 8), (64, 8), (1000, 8), (10, 8, 10)), *rows((8, 7), (8, 768)))
@hypothesis.given(seeds)
@few_examples
def test_double_precision(case, seed):
    """float64 has 29 bits more, and the bounds are as much smaller."""
    random = np.random.default_rng(seed)
    batches = [make_batch(random, case.draw(random, far_from_zero, np.float64))]
    for place in (0, case.values - 1):
        x = case.draw(random, with_outlier, place, np.float64)
        batches.append(make_batch(random, x, affine=case.layer == "BatchNorm"))
    with jax.enable_x64(True):
        for batch in batches:
            case.check(batch, scale=2.0**-29)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@each(*cases((7, 8), (1000, 8), (16, 4, 7, 7)), *rows((8, 7)))
@hypothesis.given(seeds, st.data())
@few_examples
def test_what_is_not_finite_stays_in_its_channel_or_example(case, bad, seed, data):
    random = np.random.default_rng(seed)
    batch = make_batch(random, case.draw(random, far_from_zero))
    place = [data.draw(st.integers(0, size - 1)) for size in case.shape]
    spoilt = batch.x.copy()
    spoilt[tuple(place)] = bad
    others = np.arange(case.shape[case.axis]) != place[case.axis]
    results = []
    for x in (batch.x, spoilt):
        if case.layer == "BatchNorm":
            y, *_, dweight, dbias, dx = train(batch.weight, batch.bias, x, batch.dy, None)
            results.append([y, dx, dweight[None], dbias[None]])
        else:  # whose weight and bias have gradients from all examples
            y, _, _, dx = train_rows(batch.weight, batch.bias, x, batch.dy)
            results.append([y, dx])
    results = [list(map(np.asarray, arrays)) for arrays in results]
    for without, with_bad in zip(*results, strict=True):
        alike = [np.compress(others, array, case.axis) for array in (without, with_bad)]
        assert bits(alike[0]) == bits(alike[1])
    assert not np.isfinite(np.take(results[1][0], place[case.axis], case.axis)).any()


def make_mask(shape, third):
    """Returns a mask of all places, or of all but the first, the fourth and so on."""
    number = np.arange(np.prod(shape) // shape[1]).reshape(shape[0], *shape[2:])
    return number % 3 != 0 if third else number >= 0


each_mask = pytest.mark.parametrize("third", [False, True], ids=["none out", "a third out"])


@each_mask
@each(*cases((7, 8), (64, 8), (1000, 8)), *SPATIAL)
@hypothesis.given(seeds)
@few_examples
def test_masked(case, third, seed):
    """A NaN stands wherever a place does not count."""
    random = np.random.default_rng(seed)
    mask = make_mask(case.shape, third)
    batch = make_batch(random, case.draw(random, far_from_zero))
    np.moveaxis(batch.x, 1, -1)[~mask] = np.nan
    check(batch, mask)
    if not third:
        check(make_batch(random, case.draw(random, with_outlier, 0), affine=False), mask)


# --- A constant gives the bias to the bit: https://github.com/BVLC/caffe/issues/3963.

# Every 32-bit number in the range may come, also those that no decimal writes shortly.
constants = st.lists(
    st.floats(float(np.float32(1e-3)), 65504, width=32), min_size=8, max_size=8
)
KNOWN = [1e-3, 0.1, 1 / 3, 300.0, 65504.0, 1.0, 1e4, 7.0]


@eqx.filter_jit
def of_constant(weight, bias, x, mask, activation):
    layer, state = make(8, "batch", eps=EPS, approach="batch", activation=activation)
    layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))

    def one(x, mask):
        return layer(x, state, mask=mask)

    y, after = jax.vmap(one, axis_name="batch", out_axes=(0, None))(x, mask)
    return y, after.get(layer.memory_index).variance


@pytest.mark.parametrize(
    ("shape", "activation", "third", "dtype"),
    [
        *(((n, 8), None, None, np.float32) for n in (2, 7, 9, 121, 1613)),
        ((7, 8), jax.nn.relu, None, np.float32),
        *((shape, jax.nn.relu, False, np.float32) for shape in ((121, 8), (8, 8, 5, 5))),
        *((shape, jax.nn.relu, True, np.float32) for shape in ((7, 8), (121, 8), (8, 8, 5, 5))),
        *(((7, 8), None, None, half) for half in (jnp.float16, jnp.bfloat16)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@hypothesis.given(constants)
@hypothesis.example(KNOWN)
def test_a_constant_channel(shape, activation, third, dtype: Any, constants):
    """1/n, rounded, would give another mean."""
    weight, bias = (np.linspace(*ends, 8, dtype=np.float32) for ends in ((0.5, 1.5), (-2, 2)))
    mask = None if third is None else make_mask(shape, third)
    counts = True if mask is None else mask[:, None]
    x = np.broadcast_to(by_channel(constants, len(shape)).astype(dtype), shape)
    x = np.where(counts, x, np.asarray(np.nan, dtype))
    y, variance = of_constant(weight, bias, x, mask, activation)
    assert bits(variance) == bits(np.zeros_like(variance))
    right = jnp.asarray(bias) if activation is None else activation(bias)
    right = by_channel(np.asarray(right.astype(dtype)), len(shape))
    assert (np.asarray(y) == np.where(counts, np.broadcast_to(right, shape), 0)).all()


@pytest.mark.parametrize("n", [7, 9, 121])
@hypothesis.given(constants)
@few_examples
def test_a_constant_example(n, constants):
    x = np.repeat(np.asarray(constants, np.float32)[:, None], n, axis=1)
    weight = np.linspace(0.5, 1.5, n, dtype=np.float32)
    bias = np.linspace(-2, 2, n, dtype=np.float32)
    y, *_ = train_rows(weight, bias, x, x)
    assert bits(y) == bits(np.broadcast_to(bias, x.shape))
