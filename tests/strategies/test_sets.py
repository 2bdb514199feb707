"""Tests `Moments` of several sets: a count has the leading axes of the mean or is a scalar."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import moments, normalise
from eqx_norm.strategies import Moments
from tests.compiling import jit
from tests.helpers import f32, normal

UNOPTIMISED = True  # compares values: tests/compiling.py

pytestmark = pytest.mark.x32  # has its own dtypes


def drawn(seed: int, sets: tuple[int, ...], channels: int, kind: str, ddof: int) -> Moments:
    """Returns random moments of these sets, with a count of one kind."""
    random = np.random.RandomState(seed)
    shape = (*sets, channels)
    mean, m2 = random.standard_normal(shape), 1 + random.rand(*shape)
    number = random.choice([2, 5, 30], () if kind in ("known", "traced") else shape)
    count: Any = np.asarray(number if kind != "each known" else number[..., 0], np.float32)
    if kind == "each traced":
        count = jnp.asarray(count[..., 0])
    elif kind in ("traced", "each channel"):
        count = jnp.asarray(count)
    elif kind == "unknown":
        count = None
    return Moments(count, jnp.float32(mean), jnp.float32(m2), ddof)


def one(several: Moments, index: tuple[int, ...]) -> Moments:
    """Returns one set by NumPy's indices alone."""
    sets = several.m2.shape[:-1]
    count = several.count
    if count is not None and not isinstance(count, np.floating) and count.ndim:
        assert count.shape in (sets, several.m2.shape)
        count = count[index]
    parts = several.mean_pair.parts[index]
    pair = type(several.mean_pair)(parts)
    return Moments(count, pair, several.m2[index], several.ddof)


def assert_equal(found: Any, expected: Any) -> None:
    """Compares moments of which one count may be a scalar, and arrays."""
    if not isinstance(found, Moments):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        return
    assert (found.count is None) == (expected.count is None)
    if found.count is not None:
        count = np.broadcast_to(expected.count, found.count.shape)
        np.testing.assert_array_equal(found.count, count)
    assert found.mean.shape == found.m2.shape == expected.mean.shape
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.m2, expected.m2, rtol=1e-6)
    assert found.ddof == expected.ddof


ONE_SET: dict[str, Any] = {
    "variance": lambda a, b, share: a.variance,
    "merge": lambda a, b, share: a.merge(b),
    "towards": lambda a, b, share: a.towards(b, share),
    "astype": lambda a, b, share: a.astype(jnp.complex64),
    "finite": lambda a, b, share: a.finite,
    "of": lambda a, b, share: Moments.of(a.mean_pair, b.m2, a.count, 1),
    "zero": lambda a, b, share: Moments.zero(a.m2.shape, a.m2.dtype).merge(a),
}


# Sets, channels, the kinds of two counts, the shape of a share, and ddof. Few sizes, which
# coincide, because each one compiles anew.
CASES: list[Any] = [
    ((1,), 3, ("each known", "known"), "each", 0),
    ((3,), 3, ("known", "each traced"), "scalar", 0),
    ((3,), 3, ("each known", "each channel"), "each channel", 1),
    ((3,), 3, ("unknown", "traced"), "each", 0),
    ((3, 3), 1, ("each traced", "each channel"), "each", 1),
    ((3, 3), 1, ("traced", "each known"), "each channel", 0),
    ((3, 3), 1, ("each channel", "unknown"), "scalar", 1),
]


@pytest.mark.parametrize(("sets", "channels", "kinds", "of", "ddof"), CASES)
def test_methods_treat_each_set_as_if_it_were_alone(sets, channels, kinds, of, ddof):
    a, b = (drawn(i, sets, channels, kind, ddof) for i, kind in enumerate(kinds))
    axes = {"scalar": (), "each": sets, "each channel": (*sets, channels)}[of]
    share = np.asarray(np.random.RandomState(2).rand(*axes), np.float32)
    for name, method in ONE_SET.items():
        needed = {"merge": [a.count, b.count], "zero": [a.count]}.get(name, [])
        if any(count is None for count in needed):
            continue
        found = method(a, b, share)
        for index in np.ndindex(sets):
            share_of_one = share if of == "scalar" else share[index]
            expected = method(one(a, index), one(b, index), share_of_one)
            part = one(found, index) if isinstance(found, Moments) else found[index]
            assert_equal(part, expected)
    if a.count is not None:
        pooled = a.pooled()
        for index in np.ndindex(sets[1:]):
            merged = one(a, (0, *index))
            for i in range(1, sets[0]):
                merged = merged.merge(one(a, (i, *index)))
            assert_equal(one(pooled, index), merged)


def test_a_scan_of_merges_is_that_of_the_mapped_merge():
    """Has as many sets as channels in one case, and one channel in another."""
    for shape in ((3, 3), (4, 1)):
        x = normal(0, shape)
        sets = jax.vmap(lambda row: moments(row[None], 0))(x)
        found = jit(lambda sets: jax.lax.associative_scan(Moments.merge, sets))(sets)
        expected = np.stack([np.var(x[: i + 1], 0) for i in range(len(x))])
        np.testing.assert_allclose(found.variance, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", [None, True])
def test_sets_of_an_array_can_be_indexed_scanned_pooled_and_used(mask):
    x = normal(1, (4, 9, 4), 3)
    sets = moments(x, 1, mask=mask)
    whole = sets.pooled()
    np.testing.assert_allclose(whole.variance, np.var(x, (0, 1)), rtol=1e-5)
    third = jax.tree.map(lambda leaf: leaf[2], sets)
    np.testing.assert_allclose(third.variance, np.var(x[2], 0), rtol=1e-5)
    first = jax.tree.map(lambda leaf: leaf[0], sets)
    rest = jax.tree.map(lambda leaf: leaf[1:], sets)
    merged, _ = jax.lax.scan(lambda a, b: (a.merge(b), None), first, rest)
    np.testing.assert_allclose(merged.variance, whole.variance, rtol=1e-5)
    y = normalise(x, sets, axis=1)
    np.testing.assert_allclose(y, jax.vmap(lambda x, m: normalise(x, m, axis=0))(x, sets))
    assert moments(x[:, :, 0], 1, mask=mask).pooled().mean.shape == (1,)


@pytest.mark.parametrize("axes", [(), (1,), (1, 3), (4, 1)])
def test_pooled_counts_a_number_that_sets_share_for_each_of_them(axes):
    mean, m2 = normal(2, (4, 3)), 1 + normal(3, (4, 3)) ** 2
    pooled = jit(Moments.pooled)
    shared = pooled(Moments(jnp.full(axes, 5.0), mean, m2))
    full = pooled(Moments(jnp.full((4, 3), 5.0), mean, m2))
    np.testing.assert_array_equal(jnp.broadcast_to(shared.known_count, (3,)), full.count)
    np.testing.assert_allclose(shared.mean, full.mean, rtol=1e-6)
    np.testing.assert_allclose(shared.m2, full.m2, rtol=1e-6)


NUMBERS = Moments.of(np.zeros((2, 3)), np.ones((2, 3)), f32([4, 5]))
ZERO = Moments.zero(3, np.float32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: Moments.of(np.zeros((2, 3)), 1.0, np.ones(3)),
            r"count has shape \(3,\).*\(2, 3\)",
        ),
        (lambda: Moments.of(np.zeros(3), np.ones(4)), r"variance has shape \(4,\).*\(3,\)"),
        (lambda: Moments.of(np.zeros((3, 3)), np.ones(3)), r"variance has shape \(3,\)"),
        (lambda: NUMBERS.merge(ZERO), r"\(2, 3\).*\(3,\)"),
        (
            lambda: Moments.zero(3, np.float32).merge(Moments.zero(4, np.float32)),
            r"\(3,\).*\(4,",
        ),
        (lambda: NUMBERS.towards(NUMBERS, np.ones(3)), r"share has shape \(3,\).*\(2, 3\)"),
        (lambda: NUMBERS.towards(Moments.of(np.zeros(3), 1.0), 0.5), r"\(2, 3\).*\(3,\)"),
        (lambda: Moments(np.ones(3), np.zeros((2, 3)), jnp.ones((2, 3))).variance, r"\(3,\)"),
        (lambda: Moments(np.ones(3), np.zeros((2, 3)), jnp.ones((2, 3))).pooled(), r"\(3,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_quoted(call, words):
    with pytest.raises(ValueError, match=words):
        call()
