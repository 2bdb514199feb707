"""`Moments` is a commutative monoid, and its merge is as good as seeing all values at once."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from eqx_norm.strategies import Moments

from .helpers import f32


def of_values(values: np.ndarray) -> Moments:
    values = np.asarray(values, np.float64)
    mean = values.mean(0) if len(values) else np.zeros(values.shape[1])
    m2 = (np.abs(values - mean) ** 2).sum(0)
    return Moments(f32(len(values)), f32(mean), f32(m2))


def assert_same(a: Moments, b: Moments, scale: float) -> None:
    """Equal up to the rounding of a few float32 operations on values of that size.

    Each of them may also lose what is smaller than the smallest normal number, which XLA
    flushes to zero.
    """
    ulp, tiny = float(np.finfo(np.float32).eps), float(np.finfo(np.float32).tiny)
    np.testing.assert_array_equal(a.count, b.count)
    np.testing.assert_allclose(a.mean, b.mean, rtol=0, atol=8 * ulp * scale + 8 * tiny)
    m2_atol = 16 * ulp * scale**2 * float(a.count) + 16 * tiny
    np.testing.assert_allclose(a.m2, b.m2, rtol=16 * ulp, atol=m2_atol)


part = st.tuples(st.integers(0, 6), st.floats(-100, 100, width=32), st.floats(0, 10, width=32))


@hypothesis.given(st.lists(part, min_size=3, max_size=3), st.integers(0, 2**31 - 1))
def test_merge_is_associative_commutative_and_exact(parts, seed):
    random = np.random.RandomState(seed)
    values = [mean + std * random.standard_normal((n, 2)) for n, mean, std in parts]
    together = np.concatenate(values)
    scale = float(np.abs(together).max()) if len(together) else 1.0
    a, b, c = map(of_values, values)
    assert_same(a.merge(b), b.merge(a), scale)
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)), scale)
    assert_same(a.merge(b).merge(c), of_values(together), scale)


def test_zero_is_neutral_to_the_bit():
    a = of_values(np.random.RandomState(0).standard_normal((7, 3)))
    zero = Moments.zero(3, jnp.float32)
    for merged in (a.merge(zero), zero.merge(a)):
        jax.tree.map(np.testing.assert_array_equal, merged, a)
    both = zero.merge(zero)
    jax.tree.map(np.testing.assert_array_equal, both, zero)


def test_equal_constants_merge_to_that_constant():
    tenth = f32([0.1])
    a, b = (Moments(f32(n), tenth, jnp.zeros(1)) for n in (3, 7))
    merged = a.merge(b)
    assert merged.mean == tenth
    assert merged.m2 == 0


def test_complex_moments():
    random = np.random.RandomState(0)
    values = random.standard_normal((9, 2)) + 1j * random.standard_normal((9, 2))

    def moments(values):
        mean = values.mean(0)
        return Moments(
            f32(len(values)),
            jnp.asarray(mean, jnp.complex64),
            jnp.asarray((np.abs(values - mean) ** 2).sum(0), jnp.float32),
        )

    merged, whole = moments(values[:4]).merge(moments(values[4:])), moments(values)
    np.testing.assert_allclose(merged.mean, whole.mean, rtol=1e-6)
    np.testing.assert_allclose(merged.m2, whole.m2, rtol=1e-6)
    assert merged.m2.dtype == jnp.float32


@pytest.mark.parametrize("ddof", [0, 1])
def test_variances(ddof):
    values = np.random.RandomState(0).standard_normal((5, 2))
    batch = of_values(values)
    batch = dataclasses.replace(batch, ddof=ddof)
    np.testing.assert_allclose(batch.variance, values.var(0), rtol=1e-6)
    np.testing.assert_allclose(batch.memory_variance, values.var(0, ddof=ddof), rtol=1e-6)


def test_nothing_has_variance_one():
    np.testing.assert_array_equal(Moments.zero(2, jnp.float32).variance, [1, 1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_finite(bad):
    assert of_values(np.ones((2, 2))).finite
    one = jnp.ones(2)
    assert not Moments(f32(2), one.at[1].set(bad), one).finite
    assert not Moments(f32(2), one, one.at[0].set(bad)).finite
