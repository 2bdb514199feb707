"""Tests that both layers are as exact as their arithmetic allows, where that is hard.

The cases are those of `experiments.accuracy`, with fresh seeds, small and prime numbers of
values, masks, and float64.
"""

from typing import Any, Literal, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm
from tests import exact
from tests.exact import Batch
from tests.helpers import bits
from tests.layers.accuracy import (
    by_channel,
    check,
    far_from_zero,
    make_batch,
    seeds,
    train,
    with_outlier,
)

pytestmark = pytest.mark.x32  # has its own dtypes


class Case(NamedTuple):
    """Names a layer and the shape of a batch: `[N, C, *spatial]`, or `[examples, values]`."""

    layer: Literal["BatchNorm", "LayerNorm"]
    shape: tuple[int, ...]

    def __str__(self):
        return f"{self.layer} {'x'.join(map(str, self.shape))}"

    @property
    def axis(self):
        """Returns the axis of what is normalised by its own moments, channels or examples."""
        return 1 if self.layer == "BatchNorm" else 0

    def draw(self, random, of_channels, *args):
        """Returns what `of_channels` draws for a shape with channels, in this case's shape."""
        if self.layer == "BatchNorm":
            return of_channels(random, self.shape, *args)
        return np.ascontiguousarray(of_channels(random, self.shape[::-1], *args).T)

    def draw_outlier(self, random, place, dtype: Any = np.float32):
        """Returns a batch with an outlier in each channel or example, at `place` of it."""
        x = self.draw(random, with_outlier, place, dtype)
        return make_batch(random, x, affine=False)

    def check(self, batch, scale=1.0):
        check(batch, layer=self.layer, scale=scale)

    def answer(self, batch):
        return train(batch, layer=self.layer)[0]


def cases(*shapes):
    return [Case("BatchNorm", shape) for shape in shapes]


def rows(*shapes):
    return [Case("LayerNorm", shape) for shape in shapes]


# Each is compiled once, whatever the seed. Few values and many, powers of two and primes.
PLAIN = cases((1, 8), (2, 8), (7, 8), (9, 8), (10, 8), (64, 8), (121, 8), (1000, 8))
SPATIAL = cases((10, 8, 10), (16, 4, 7, 7), (8, 3, 16, 16), (16, 8, 8, 8))
ROWS = rows((8, 1), (8, 2), (8, 7), (8, 121), (8, 768), (8, 1009))
# Few channels side by side, prime numbers, and a million values a channel.
LARGE = cases((4001, 3), (509, 2, 31), (1_000_000, 2), (1000, 2, 1000))

few_examples = hypothesis.settings(max_examples=8)


def each(*cases):
    return pytest.mark.parametrize("case", cases, ids=str)


def hard(case, random, dtype: Any = np.float32):
    """Yields batches with means far from zero, and with an outlier first, and elsewhere."""
    x = case.draw(random, far_from_zero, dtype)
    yield make_batch(random, x)
    # The sum of y does not depend on x: its gradient is rounding, and held as any dx.
    yield make_batch(random, x, affine=case.layer == "BatchNorm")._replace(dy=np.ones_like(x))
    # First is where a shift by the first value is worst.
    for place in (0, random.integers(x.size // case.shape[case.axis])):
        yield case.draw_outlier(random, place, dtype)


@each(*PLAIN, *SPATIAL, *ROWS)
@hypothesis.given(seeds)
@few_examples
def test_hard_values(case, seed):
    for batch in hard(case, np.random.default_rng(seed)):
        case.check(batch)


@each(*cases((2, 8), (7, 8), (64, 8), (1000, 8), (10, 8, 10)), *rows((8, 7), (8, 768)))
@hypothesis.given(seeds)
@hypothesis.example(767)  # dweight of a batch norm of two values: 1.13e-7, in float32's units
@hypothesis.example(787545)  # dbias of a layer norm of eight examples: 2.04e-7
@few_examples
def test_hard_values_in_double_precision(case, seed):
    """float64 has 29 bits more, and the bounds are as much smaller."""
    with jax.enable_x64(True):
        for batch in hard(case, np.random.default_rng(seed), np.float64):
            case.check(batch, scale=2.0**-29)


@each(*cases((7, 8), (64, 8), (1000, 8)), *SPATIAL)
@hypothesis.given(seeds)
@few_examples
def test_hard_values_and_a_third_masked(case, seed):
    """A NaN stands wherever a place does not count."""
    random = np.random.default_rng(seed)
    mask = without_a_third(case.shape)
    for batch in (
        make_batch(random, case.draw(random, far_from_zero)),
        case.draw_outlier(random, place=1),
    ):
        np.moveaxis(batch.x, 1, -1)[~mask] = np.nan
        check(batch, mask)


def without_a_third(shape):
    """Returns a mask of all places but the first, the fourth and so on."""
    return np.arange(np.prod(shape) // shape[1]).reshape(shape[0], *shape[2:]) % 3 != 0


@each(*LARGE, *rows((2, 1_000_000)))
@hypothesis.given(seeds)
@hypothesis.settings(max_examples=2)
def test_many_values(case, seed):
    random = np.random.default_rng(seed)
    x = (1e3 + random.standard_normal(case.shape)).astype(np.float32)
    case.check(make_batch(random, x, affine=case.layer == "LayerNorm"))


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_pair_of_oneflow_6149(dtype):
    """Both values come out right, and dx is 0: https://github.com/Oneflow-Inc/oneflow/issues/6149."""
    x = np.array([-1.83965693, -1.82964566], dtype)
    with jax.enable_x64(dtype == np.float64):
        y, pull_back = jax.vjp(LayerNorm(2, use_weight=False, use_bias=False), x)
        (dx,) = pull_back(jnp.ones_like(y))
    right = exact.layer_norm(Batch(x[None], np.ones_like(x[None]), None, None)).answer.y[0]
    np.testing.assert_allclose(y, right.astype(float), rtol=1e-6)
    np.testing.assert_allclose(right.astype(float), [-0.8454, 0.8454], atol=5e-5)
    np.testing.assert_array_equal(dx, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@each(*cases((7, 8), (1000, 8), (16, 4, 7, 7)), *rows((8, 7)))
@hypothesis.given(seeds, st.data())
@few_examples
def test_what_is_not_finite_stays_in_its_channel_or_example(case, bad, seed, data):
    random = np.random.default_rng(seed)
    batch = make_batch(random, case.draw(random, far_from_zero))
    place = tuple(data.draw(st.integers(0, size - 1)) for size in case.shape)
    spoilt = batch._replace(x=batch.x.copy())
    spoilt.x[place] = bad
    others = np.arange(case.shape[case.axis]) != place[case.axis]
    clean, found = (case.answer(b) for b in (batch, spoilt))
    # Weight and bias of a layer norm have gradients from all examples.
    of_channels = ("dweight", "dbias") if case.layer == "BatchNorm" else ()
    for name in ("y", "dx", *of_channels):
        arrays = (np.asarray(getattr(answer, name)) for answer in (clean, found))
        alike = [np.compress(others, a, case.axis if a.ndim > 1 else 0) for a in arrays]
        assert bits(alike[0]) == bits(alike[1]), name
    assert not np.isfinite(np.compress(~others, found.y, case.axis)).any()


# Every 32-bit number in the range may come, also those that no decimal writes shortly.
constants = st.lists(
    st.floats(float(np.float32(1e-3)), 65504, width=32), min_size=8, max_size=8
)
KNOWN = [1e-3, 0.1, 1 / 3, 300.0, 65504.0, 1.0, 1e4, 7.0]
CONSTANT = [
    *cases(*((n, 8) for n in (2, 7, 9, 121, 1613)), (8, 8, 5, 5)),
    *rows((8, 7), (8, 9), (8, 121)),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, np.float32) for case in CONSTANT),
        *((case, half) for case in cases((7, 8)) for half in (jnp.float16, jnp.bfloat16)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@hypothesis.given(constants)
@hypothesis.example(KNOWN)
def test_a_constant_gives_the_bias_to_the_bit(case, dtype: Any, constants):
    """1/n, rounded, would give another mean: https://github.com/BVLC/caffe/issues/3963."""

    def constant_channels(_, shape):
        return np.broadcast_to(by_channel(constants, len(shape)), shape).astype(dtype)

    random = np.random.default_rng(0)
    batch = make_batch(random, case.draw(random, constant_channels))
    bias = by_channel(batch.bias.astype(dtype), batch.x.ndim)
    answer = case.answer(batch)
    assert bits(answer.y) == bits(np.broadcast_to(bias, batch.x.shape))
    if case.layer == "BatchNorm":
        assert not np.asarray(answer.variance).any()
        counts = without_a_third(case.shape)[:, None]
        spoilt = batch._replace(x=np.where(counts, batch.x, np.asarray(np.nan, dtype)))
        masked, _ = train(spoilt, counts[:, 0])
        assert not np.asarray(masked.variance).any()
        np.testing.assert_array_equal(masked.y, np.where(counts, answer.y, 0))
