"""Tests that `Moments` form a commutative monoid, and that merging them is exact."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from eqx_norm.strategies import Moments, Pair
from tests.helpers import exact, f32


def of_values(values: np.ndarray) -> Moments:
    mean = values.mean(0) if len(values) else np.zeros_like(values[0:1].sum(0))
    m2 = (np.abs(values - mean) ** 2).sum(0)
    dtype = jnp.complex64 if np.iscomplexobj(values) else jnp.float32
    return Moments(f32(len(values)), jnp.asarray(mean, dtype), f32(m2))


def assert_same(a: Moments, b: Moments, scale: float) -> None:
    """Allows the rounding of a few float32 operations on values of that size.

    Each of them may also lose what is below the smallest normal number, which XLA flushes to
    zero.
    """
    ulp, tiny = float(np.finfo(np.float32).eps), float(np.finfo(np.float32).tiny)
    np.testing.assert_array_equal(a.count, b.count)
    np.testing.assert_allclose(a.mean, b.mean, rtol=0, atol=8 * ulp * scale + 8 * tiny)
    m2_atol = 16 * ulp * scale**2 * float(a.count) + 16 * tiny
    np.testing.assert_allclose(a.m2, b.m2, rtol=16 * ulp, atol=m2_atol)


part = st.tuples(st.integers(0, 6), st.floats(-100, 100, width=32), st.floats(0, 10, width=32))


@hypothesis.given(
    st.lists(part, min_size=3, max_size=3), st.booleans(), st.integers(0, 2**31 - 1)
)
def test_merge_is_associative_commutative_and_exact(parts, is_complex, seed):
    random = np.random.RandomState(seed)
    values = [mean + std * random.standard_normal((n, 4)) for n, mean, std in parts]
    if is_complex:
        values = [part[:, :2] + 1j * part[:, 2:] for part in values]
    together = np.concatenate(values)
    scale = float(np.abs(together).max()) if len(together) else 1.0
    a, b, c = map(of_values, values)
    assert_same(a.merge(b), b.merge(a), scale)
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)), scale)
    assert_same(a.merge(b).merge(c), of_values(together), scale)
    assert a.merge(b).m2.dtype == jnp.float32
    assert_same(stacked(a, b, c).pooled(), of_values(together), scale)


def test_zero_is_neutral_to_the_bit_and_has_variance_1():
    a = of_values(np.random.RandomState(0).standard_normal((7, 3)))
    zero = Moments.zero(3, jnp.float32)
    for merged, right in ((a.merge(zero), a), (zero.merge(a), a), (zero.merge(zero), zero)):
        jax.tree.map(np.testing.assert_array_equal, merged, right)
    np.testing.assert_array_equal(zero.variance, [1, 1, 1])


def stacked(*sets: Moments) -> Moments:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)


def test_equal_constants_merge_to_that_constant():
    a, b = (Moments(f32(n), f32([0.1]), f32([0])) for n in (3, 7))
    nothing = Moments(f32(0), f32([1e30]), f32([0]))  # whose mean must not matter
    for merged in (a.merge(b), stacked(nothing, a, b, a, nothing).pooled()):
        assert (merged.mean, merged.mean_pair.rest, merged.m2) == (f32(0.1), 0, 0)
    empty = stacked(nothing, nothing).pooled()
    assert (empty.count, empty.m2, empty.variance) == (0, 0, 1)


@pytest.mark.parametrize("ddof", [0, 1])
def test_variances(ddof):
    values = np.random.RandomState(0).standard_normal((5, 2))
    batch = dataclasses.replace(of_values(values), ddof=ddof)
    np.testing.assert_allclose(batch.variance, values.var(0), rtol=1e-6)
    np.testing.assert_allclose(batch.memory_variance, values.var(0, ddof=ddof), rtol=1e-6)


# --- To twice the precision.


def pair(values: np.ndarray) -> Moments:
    """Returns the moments of `values`, with their mean in 48 bits."""
    mean = values.mean(0)
    high = mean.astype(np.float32)
    m2 = ((values - mean) ** 2).sum(0)
    return Moments(f32(len(values)), Pair.of(f32(high), f32(mean - high)), f32(m2))


def both(moments: Moments) -> np.ndarray:
    return exact(moments.mean_pair)


RATIOS = [1.0, 1e3, 1e7]
run = pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["op by op", "jit"])


@run
@pytest.mark.parametrize("ratio", RATIOS)
def test_merged_far_from_zero(ratio, run):
    """The mean is off by 1e-7 standard deviations at most, after 64 merges as well, or one."""
    values = ratio + np.random.RandomState(3).standard_normal((640, 5))
    merge = run(Moments.merge)
    merged = Moments.zero(5, jnp.float32)
    for part in np.split(values, 64):
        merged = merge(merged, pair(part))
    np.testing.assert_allclose(both(merged), values.mean(0), rtol=0, atol=1e-7)
    np.testing.assert_allclose(merged.m2, values.var(0) * 640, rtol=64 * 6e-8)
    pooled = run(Moments.pooled)(stacked(*map(pair, np.split(values, 64))))
    np.testing.assert_allclose(both(pooled), values.mean(0), rtol=0, atol=1e-7)
    np.testing.assert_allclose(pooled.m2, values.var(0) * 640, rtol=1e-6)


@run
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("share", [0.5, [0.0, 1e-6, 0.3, 1 - 1e-6, 1.0]], ids=["one", "five"])
def test_towards(share, ratio, run):
    random = np.random.RandomState(4)
    a, b = (ratio + s * random.standard_normal((20, 5)) for s in (1, 3))
    ours, other, share = pair(a), pair(b), f32(share)
    moved = run(Moments.towards)(ours, other, share)
    share = np.broadcast_to(np.float64(share), 5)
    right = (1 - share) * both(ours) + share * both(other)
    np.testing.assert_allclose(both(moved), right, rtol=0, atol=1e-7)
    variance = (1 - share) * a.var(0) + share * b.var(0)
    np.testing.assert_allclose(moved.variance, variance, rtol=4e-7)
    for end, at in ((ours, 0), (other, 1)):
        means, variances = (
            (moved.mean_pair.parts, end.mean_pair.parts),
            (moved.variance, end.variance),
        )
        for found, there in (means, variances):
            np.testing.assert_array_equal(found[..., share == at], there[..., share == at])
    assert type(moved) is Moments
    assert moved.count == 1


def test_the_derivative_of_a_pair_is_that_of_its_sum():
    def sum_of(a, share):
        other = Moments.of(Pair.of(f32([1e7]), f32([0.1])), f32([2.0]))
        moved = Moments.of(Pair.of(a) + a / 1e2, a**2).towards(other, share)
        return (moved.mean + moved.mean_pair.rest + moved.variance)[0]

    for share in (0.25, 0.75):
        derivative = jax.grad(sum_of)(f32([3.0]), share)
        np.testing.assert_allclose(derivative, [(1 - share) * (1 + 1e-2 + 6)], rtol=1e-6)


def test_complex_pairs():
    a, b = (jnp.asarray([m], jnp.complex64) for m in (1e7 + 1e7j, 1e7 + 3 - 2e7j))
    one = jnp.ones(1)
    moved = Moments.of(a, one).towards(Moments.of(b, one), 0.25)
    right = 0.75 * np.complex128(a) + 0.25 * np.complex128(b)
    np.testing.assert_array_equal(both(moved), right)


def test_compiled_it_is_the_same_mean():
    """A product that is rounded together with the sum would give another mean."""
    random = np.random.RandomState(5)
    a, b = (Moments.of(f32(random.standard_normal(4096)), jnp.ones(4096)) for _ in range(2))
    eager, compiled = (f(a, b, 0.3) for f in (Moments.towards, jax.jit(Moments.towards)))
    np.testing.assert_array_equal(eager.mean, compiled.mean)
