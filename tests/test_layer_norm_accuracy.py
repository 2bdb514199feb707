"""LayerNorm holds the bounds of BatchNorm: an example is a channel, and all its values count.

The reference, the cases and the bounds are those of test_accuracy, with rows for channels.
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
from experiments.lab import exact
from experiments.lab.exact import EPS, Answer, Batch

from .helpers import bits
from .test_accuracy import BOUNDS, DWEIGHT_OF_ITSELF, constants, far_from_zero, with_outlier

# [examples, values]: few and many, powers of two and primes.
SHAPES = ((8, 1), (8, 2), (8, 7), (8, 121), (8, 768), (8, 1009))
seeds = st.integers(0, 2**32 - 1)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
few_examples = hypothesis.settings(max_examples=8)


@jax.jit
def train(weight, bias, x, dy):
    def forward(weight, bias, x):
        layer = LayerNorm(x.shape[1], eps=EPS)
        return jax.vmap(eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias)))(x)

    y, pull_back = jax.vjp(forward, weight, bias, x)
    return y, *pull_back(dy)


def check(random, x, *, affine=True, sum_of_y=False, scale=1.0):
    """Every quantity within its bound; `scale` is the ulp's, relative to float32."""
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    values = x.shape[1]
    dy = (np.ones(x.shape) if sum_of_y else random.standard_normal(x.shape)).astype(x.dtype)
    weight = (random.uniform(0.5, 1.5, values) if affine else np.ones(values)).astype(dtype)
    bias = (random.uniform(-1, 1, values) if affine else np.zeros(values)).astype(dtype)
    y, dweight, dbias, dx = map(np.asarray, train(weight, bias, x, dy))
    assert y.dtype == dx.dtype == x.dtype
    assert dweight.dtype == dtype

    # Of values shifted by the first, which changes nothing, and which 64 bits hold exactly.
    batch = Batch(x, dy, weight, bias)
    shifted = x.astype(np.longdouble) - x[:, :1].astype(np.longdouble)
    right = exact.layer_norm(batch._replace(x=shifted))
    found = exact.errors(batch, right, Answer(y, None, dx, None, dbias))
    for quantity in ("y", "dx", "dbias"):
        assert getattr(found, quantity) <= scale * BOUNDS[quantity], quantity

    # Each example has an rstd of its own, which is off by as much of itself as BatchNorm's.
    each = np.abs(dy.astype(np.longdouble))
    unit = BOUNDS["dweight"] * each + DWEIGHT_OF_ITSELF * each * np.abs(right.xhat)
    off = np.abs(dweight - right.answer.dweight)
    assert np.max(off / unit.sum(0)) <= scale


def examples(random, shape, dtype: Any = np.float32):
    """Each of another mean and standard deviation; mean/std from 1 to 1e7."""
    return np.ascontiguousarray(far_from_zero(random, shape[::-1], dtype).T)


@each_shape
@hypothesis.given(seeds)
@few_examples
def test_means_far_from_zero(shape, seed):
    random = np.random.default_rng(seed)
    check(random, examples(random, shape))


@hypothesis.given(seeds)
@hypothesis.settings(max_examples=2)
def test_many_values(seed):
    random = np.random.default_rng(seed)
    check(random, (1e3 + random.standard_normal((2, 1_000_000))).astype(np.float32))


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@hypothesis.given(seeds, st.data())
@few_examples
def test_an_outlier(shape, seed, data):
    random = np.random.default_rng(seed)
    for place in (0, data.draw(st.integers(1, shape[1] - 1))):
        x = with_outlier(random, shape[::-1], place).T
        check(random, np.ascontiguousarray(x), affine=False)


@each_shape
@hypothesis.given(seeds)
@few_examples
def test_the_gradient_of_a_sum_is_nothing(shape, seed):
    random = np.random.default_rng(seed)
    check(random, examples(random, shape), affine=False, sum_of_y=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_pair_of_oneflow_6149(dtype):
    """https://github.com/Oneflow-Inc/oneflow/issues/6149"""
    with jax.enable_x64(dtype == np.float64):
        x = jnp.asarray([-1.83965693, -1.82964566], dtype)
        layer = LayerNorm(2, use_weight=False, use_bias=False)
        y, pull_back = jax.vjp(layer, x)
        half = np.asarray(x, np.longdouble)[1] / 2 - np.asarray(x, np.longdouble)[0] / 2
        right = half / np.sqrt(half**2 + np.longdouble(1e-5))
        np.testing.assert_allclose(y, [-float(right), float(right)], rtol=1e-6)
        assert float(f"{right:.4f}") == 0.8454
        (dx,) = pull_back(jnp.ones(2, dtype))
        assert (np.asarray(dx) == 0).all()


@pytest.mark.parametrize("n", [7, 9, 121])
@hypothesis.given(constants)
@few_examples
def test_a_constant_gives_the_bias_to_the_bit(n, constants):
    x = np.repeat(np.asarray(constants, np.float32)[:, None], n, axis=1)
    weight = np.linspace(0.5, 1.5, n, dtype=np.float32)
    bias = np.linspace(-2, 2, n, dtype=np.float32)
    y, *_ = train(weight, bias, x, x)
    assert bits(y) == bits(np.broadcast_to(bias, x.shape))


@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [(jnp.float16, 300, 1), (jnp.float16, 0, 300), (jnp.bfloat16, 100, 1)],
)
@pytest.mark.parametrize("shape", [(8, 7), (8, 768)], ids=str)
@hypothesis.given(seeds)
@few_examples
def test_half_precision(shape, dtype, mean, std, seed):
    random = np.random.default_rng(seed)
    x = (mean + std * random.standard_normal(shape)).astype(jnp.dtype(dtype))
    check(random, x, affine=False)


@pytest.mark.parametrize("shape", [(8, 7), (8, 768)], ids=str)
@hypothesis.given(seeds)
@few_examples
def test_double_precision(shape, seed):
    random = np.random.default_rng(seed)
    with jax.enable_x64(True):
        check(random, examples(random, shape, np.float64), scale=2.0**-29)


def test_what_is_not_finite_stays_in_its_example():
    random = np.random.default_rng(0)
    x = examples(random, (8, 7))
    spoilt = x.copy()
    spoilt[3, 2] = np.inf
    ones = np.ones(7, np.float32)
    without, with_inf = (np.asarray(train(ones, ones, v, x)[0]) for v in (x, spoilt))
    others = np.arange(8) != 3
    assert bits(without[others]) == bits(with_inf[others])
    assert not np.isfinite(with_inf[3]).any()
