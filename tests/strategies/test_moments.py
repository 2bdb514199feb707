"""Tests that merging `Moments` is exact, with the neutral element `Moments.zero`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.strategies import Moments, Pair
from tests.helpers import at_step, exact, f32, same


def moments_of(values: np.ndarray) -> Moments:
    """Returns the moments of float64 values, with the mean in 48 bits."""
    mean = values.sum(0) / max(len(values), 1)
    m2 = (np.abs(values - mean) ** 2).sum(0)
    value = mean.astype(np.complex64 if np.iscomplexobj(mean) else np.float32)
    rest = (mean - value).astype(value.dtype)
    return Moments(f32(len(values)), Pair.of(value, rest), f32(m2))


def stacked(*sets: Moments) -> Moments:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)


def test_zero_moments_are_neutral_to_the_bit_and_have_variance_1():
    a = moments_of(np.random.RandomState(0).standard_normal((7, 5)))
    zero, merge = Moments.zero(5, jnp.float32), jax.jit(Moments.merge)
    assert same((merge(a, zero), merge(zero, a), merge(zero, zero)), (a, a, zero))
    np.testing.assert_array_equal(zero.variance, [1] * 5)
    np.testing.assert_array_equal(Moments.zero((2, 5), jnp.float32).variance, [[1] * 5] * 2)


def test_moments_of_numbers_without_a_count_have_no_weight():
    moments, a = Moments.of(np.ones(3), 2.0), Moments.of(np.ones(3), 2.0, 7)
    assert (moments.variance.tolist(), moments.count) == ([2] * 3, None)
    taken = at_step(0, a).with_moments(moments)  # as many values as the batch
    assert (taken.count, taken.variance.tolist()) == (7, [2] * 3)
    for weigh in (moments.pooled, lambda: moments.merge(moments), lambda: a.merge(moments)):
        with pytest.raises(ValueError, match=r"values=n in .*Moments\.of\(mean, variance, n\)"):
            weigh()


def test_moments_of_equal_constants_merge_to_the_constant():
    a, b = (Moments(f32(n), f32([0.1]), f32([0])) for n in (3, 7))
    nothing = Moments(f32(0), f32([1e30]), f32([0]))  # this mean must not matter
    pooled = jax.jit(Moments.pooled)
    for merged in (jax.jit(Moments.merge)(a, b), pooled(stacked(nothing, a, b, a, nothing))):
        assert (merged.mean, merged.mean_pair.rest, merged.m2) == (f32(0.1), 0, 0)
    empty = pooled(stacked(nothing, nothing))
    assert (empty.count, empty.m2, empty.variance) == (0, 0, 1)


@pytest.mark.parametrize("is_complex", [False, True])
def test_merge_and_pooled_are_exact_far_from_zero_and_for_sets_of_any_size(is_complex):
    """Checks that the mean is wrong by at most 1e-7 standard deviations, also of 64 merges."""
    real, imaginary = 1e7 + np.random.RandomState(3).standard_normal((2, 640, 5))
    values = real + 1j * imaginary if is_complex else real
    parts = list(map(moments_of, np.split(values, [0, 1, 1, 9, *range(60, 640, 10)])))
    merge, merged = jax.jit(Moments.merge), Moments.zero(5, parts[0].mean.dtype)
    for part in parts:
        merged = merge(merged, part)
    pooled = jax.jit(Moments.pooled)(stacked(*parts))
    for moments, rtol in ((merged, 64 * 6e-8), (pooled, 1e-6)):
        assert (moments.count, moments.m2.dtype) == (640, jnp.float32)
        np.testing.assert_allclose(exact(moments.mean_pair), values.mean(0), rtol=0, atol=1e-7)
        np.testing.assert_allclose(moments.m2, values.var(0) * 640, rtol=rtol)


def test_moments_towards_others_are_exact_at_the_shares_0_and_1():
    random = np.random.RandomState(4)
    a, b = (moments_of(1e7 + s * random.standard_normal((20, 50))) for s in (1, 3))
    share = f32([0.0, 1e-6, 0.3, 1 - 1e-6, 1.0] * 10)
    moved = jax.jit(Moments.towards)(a, b, share)
    share = np.float64(share)
    mean, variance = (
        (1 - share) * np.float64(of(a)) + share * np.float64(of(b))
        for of in (lambda m: exact(m.mean_pair), lambda m: m.variance)
    )
    np.testing.assert_allclose(exact(moved.mean_pair), mean, rtol=0, atol=1e-7)
    np.testing.assert_allclose(moved.variance, variance, rtol=4e-7)
    for end, at in ((a, share == 0), (b, share == 1)):
        assert same(*((m.mean_pair.parts[:, at], m.variance[at]) for m in (moved, end)))
    assert type(moved) is Moments
    assert moved.count is None
