"""Tests that `Moments` form a commutative monoid, and that merging them is exact."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from eqx_norm.strategies import Moments, Pair
from tests.compiling import jit
from tests.helpers import exact, f32


def moments_of(values: np.ndarray) -> Moments:
    """Returns the moments of float64 values, with the mean in 48 bits."""
    mean = values.sum(0) / max(len(values), 1)
    m2 = (np.abs(values - mean) ** 2).sum(0)
    value = mean.astype(np.complex64 if np.iscomplexobj(mean) else np.float32)
    rest = (mean - value).astype(value.dtype)
    return Moments(f32(len(values)), Pair.of(value, rest), f32(m2))


def stacked(*sets: Moments) -> Moments:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)


def assert_same(a: Moments, b: Moments, scale: float) -> None:
    """Compares, and allows the rounding of a few float32 operations on values of size `scale`.

    An operation may also lose a subnormal number, which XLA flushes to zero.
    """
    ulp, tiny = float(np.finfo(np.float32).eps), float(np.finfo(np.float32).tiny)
    np.testing.assert_array_equal(a.count, b.count)
    np.testing.assert_allclose(a.mean, b.mean, rtol=0, atol=8 * ulp * scale + 8 * tiny)
    m2_atol = 16 * ulp * scale**2 * float(a.count) + 16 * tiny
    np.testing.assert_allclose(a.m2, b.m2, rtol=16 * ulp, atol=m2_atol)


part = st.tuples(st.integers(0, 6), st.floats(-100, 100, width=32), st.floats(0, 10, width=32))
seeds = st.integers(0, 2**31 - 1)


@hypothesis.given(st.lists(part, min_size=3, max_size=3), st.booleans(), seeds)
def test_merge_is_associative_commutative_and_exact(parts, is_complex, seed):
    random = np.random.RandomState(seed)
    values = [mean + std * random.standard_normal((n, 4)) for n, mean, std in parts]
    if is_complex:
        values = [part[:, :2] + 1j * part[:, 2:] for part in values]
    together = np.concatenate(values)
    scale = float(np.abs(together).max()) if len(together) else 1.0
    a, b, c = map(moments_of, values)
    merge, pooled = jit(Moments.merge), jit(Moments.pooled)
    assert_same(merge(a, b), merge(b, a), scale)
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)), scale)
    assert_same(merge(merge(a, b), c), moments_of(together), scale)
    assert merge(a, b).m2.dtype == jnp.float32
    assert_same(pooled(stacked(a, b, c)), moments_of(together), scale)


def test_zero_moments_are_neutral_to_the_bit_and_have_variance_1():
    a = moments_of(np.random.RandomState(0).standard_normal((7, 3)))
    zero = Moments.zero(3, jnp.float32)
    for merged, expected in ((a.merge(zero), a), (zero.merge(a), a), (zero.merge(zero), zero)):
        jax.tree.map(np.testing.assert_array_equal, merged, expected)
    np.testing.assert_array_equal(zero.variance, [1, 1, 1])


def test_moments_of_equal_constants_merge_to_the_constant():
    a, b = (Moments(f32(n), f32([0.1]), f32([0])) for n in (3, 7))
    nothing = Moments(f32(0), f32([1e30]), f32([0]))  # this mean must not matter
    for merged in (a.merge(b), stacked(nothing, a, b, a, nothing).pooled()):
        assert (merged.mean, merged.mean_pair.rest, merged.m2) == (f32(0.1), 0, 0)
    empty = stacked(nothing, nothing).pooled()
    assert (empty.count, empty.m2, empty.variance) == (0, 0, 1)


# --- Statistics in twice the precision.

far_from_0 = pytest.mark.parametrize("ratio", [1.0, 1e3, 1e7])
run = pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["op by op", "jit"])


@run
@far_from_0
def test_merge_and_pooled_far_from_zero(ratio, run):
    """Checks that the mean is wrong by at most 1e-7 standard deviations, also of 64 merges."""
    values = ratio + np.random.RandomState(3).standard_normal((640, 5))
    merge, merged = run(Moments.merge), Moments.zero(5, jnp.float32)
    parts = list(map(moments_of, np.split(values, 64)))
    for part in parts:
        merged = merge(merged, part)
    pooled = run(Moments.pooled)(stacked(*parts))
    for moments, rtol in ((merged, 64 * 6e-8), (pooled, 1e-6)):
        np.testing.assert_allclose(exact(moments.mean_pair), values.mean(0), rtol=0, atol=1e-7)
        np.testing.assert_allclose(moments.m2, values.var(0) * 640, rtol=rtol)


@run
@far_from_0
@pytest.mark.parametrize("share", [0.5, [0.0, 1e-6, 0.3, 1 - 1e-6, 1.0]], ids=["one", "five"])
def test_moments_towards(share, ratio, run):
    random = np.random.RandomState(4)
    a, b = (moments_of(ratio + s * random.standard_normal((20, 5))) for s in (1, 3))
    moved = run(Moments.towards)(a, b, f32(share))
    share = np.broadcast_to(np.float64(f32(share)), 5)
    mean, variance = (
        (1 - share) * np.float64(of(a)) + share * np.float64(of(b))
        for of in (lambda m: exact(m.mean_pair), lambda m: m.variance)
    )
    np.testing.assert_allclose(exact(moved.mean_pair), mean, rtol=0, atol=1e-7)
    np.testing.assert_allclose(moved.variance, variance, rtol=4e-7)
    for end, at in ((a, share == 0), (b, share == 1)):
        actual, expected = ([*m.mean_pair.parts[:, at], m.variance[at]] for m in (moved, end))
        np.testing.assert_array_equal(actual, expected)
    assert type(moved) is Moments
    assert moved.count == 1
