"""A fingerprint agrees with its formula, and sees each bit and where it is."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.determinism import fingerprint, summarise
from eqx_norm.determinism._fingerprint import hexadecimal
from tests.helpers import normal

WRAP = 2**32


def by_the_formula(words):
    """Returns the fingerprint of words, calculated in Python's integers."""

    def mix(word):
        word = ((word ^ word >> 16) * 0x85EBCA6B) % WRAP
        word = ((word ^ word >> 13) * 0xC2B2AE35) % WRAP
        return word ^ word >> 16

    first = second = 0
    for j, word in enumerate(words):
        salt = (0x243F6A88 + j * 0x9E3779B9) % WRAP
        mixed = mix(int(word) ^ salt)
        first += mixed
        second += (mixed + 0x7F4A7C15) * (salt | 1)
    return f"{first % WRAP:08x}{second % WRAP:08x}"


fingerprint_of = jax.jit(fingerprint)
fingerprints_of = jax.jit(jax.vmap(fingerprint))


def seen(tree):
    return hexadecimal(fingerprint_of(tree))


# Bits that count, of each element's bytes; and what is in x64 alone.
NARROW = {"bool": 1, "int4": 4, "uint4": 4, "int2": 2}
WIDE = ("float64", "int64", "uint64", "complex128")
DTYPES = (
    *("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64"),
    *("int32", "uint32", "int16", "uint16", "int8", "uint8", *NARROW, *WIDE, "key"),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_that_of_the_formula_and_no_flipped_bit_goes_unseen(dtype):
    size = 15
    width = 8 if dtype == "key" else np.dtype(jnp.dtype(dtype)).itemsize
    used = NARROW.get(dtype, 8 * width)
    raw = np.random.RandomState(0).randint(0, 256, (size, width)).astype(np.uint8)
    raw[:2] = [[0], [255]]  # a zero, whose sign is flipped, and a NaN, whose payload is
    raw[:, 0] &= np.uint8(2 ** min(used, 8) - 1)
    copies = np.tile(raw, (1 + size * used, 1, 1))
    for i, copy in enumerate(copies[1:]):
        place, bit = divmod(i, used)
        copy[place, bit // 8] ^= np.uint8(1 << bit % 8)
    with jax.enable_x64(dtype in WIDE):
        if dtype == "key":
            tree = jax.random.wrap_key_data(jnp.asarray(copies.view(np.uint32)))
        else:
            tree = jnp.asarray(copies.view(jnp.dtype(dtype))[..., 0])
        prints = np.asarray(fingerprints_of(tree.reshape(-1, 3, 5)))
    word = np.dtype(f"uint{8 * min(width, 4)}")
    assert hexadecimal(prints[0]) == by_the_formula(raw.view(word).reshape(-1))
    words = raw.view(np.uint32 if dtype == "key" else jnp.dtype(dtype))
    np.testing.assert_array_equal(fingerprint(words), prints[0])  # of NumPy, without x64
    assert (prints[1:] != prints[0]).any(axis=-1).all()


WIDE_NUMPY = {
    "int64": np.array([5, 2**32 + 5, -1]),
    "float64": np.array([[0.1, -0.0], [1e300, 5e-324]]),
    "complex128": np.array([1 + 2e-20j]),
    "scalar": np.float64(0.1),
    "strided": np.arange(12.0).reshape(3, 4).T[::2],
    "big-endian": np.array([0.1, 2], ">f8"),
}


@pytest.mark.parametrize("x", WIDE_NUMPY.values(), ids=WIDE_NUMPY)
def test_of_numpy_it_does_not_depend_on_x64(x):
    native = np.ascontiguousarray(x, x.dtype.newbyteorder("<"))
    expected = by_the_formula(native.reshape(-1).view(np.uint32))
    for x64 in (False, True):
        with jax.enable_x64(x64):
            assert hexadecimal(fingerprint(x)) == expected
            assert summarise(x, "x").fingerprint == expected
    with jax.enable_x64(True):
        assert seen(jnp.asarray(native.reshape(x.shape))) == expected


@pytest.mark.parametrize(
    "x", [np.array(["a"]), np.array([None]), np.ma.masked_equal([1.0, 2.0], 2.0)]
)
def test_numpy_arrays_of_no_numbers_are_an_error(x):
    with pytest.raises((TypeError, ValueError)):
        fingerprint(x)


def test_of_a_tree_it_is_that_of_its_arrays_fingerprints():
    a, b = normal(0, (3,)), normal(1, (2, 2))
    assert seen({"a": a, "b": [b, None]}) == seen(
        jnp.stack([fingerprint_of(a), fingerprint_of(b)])
    )
    assert seen([a]) == seen(a)
    with pytest.raises(ValueError, match="there is no array in it"):
        fingerprint({"a": 1.0})


@pytest.mark.parametrize("value", [0, 1])  # where sums of badly mixed bits fail
def test_neither_another_order_nor_a_bit_flipped_in_two_places_goes_unseen(value):
    pairs = np.array([(i, j) for i in range(64) for j in range(i)])
    rows = np.arange(len(pairs))[:, None]
    orders = np.tile(np.arange(64, dtype=np.float32), (len(pairs), 1))
    orders[rows, pairs] = pairs[:, ::-1]  # two words swapped
    copies = [orders]
    for bit in (0, 15, 16, 22, 23, 30, 31):
        flipped = np.full(orders.shape, value, np.float32)
        flipped.view(np.uint32)[rows, pairs] ^= np.uint32(1 << bit)
        copies.append(flipped)
    prints = np.asarray(fingerprints_of(np.concatenate(copies)))
    assert len(np.unique(prints, axis=0)) == len(prints)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 1, 4, 2)], ids=str)
def test_the_order_of_summing_is_another_on_a_cpu(shape, monkeypatch):
    x = np.asarray(normal(0, shape))
    expected = by_the_formula(x.view(np.uint32).flat)
    assert seen(x) == expected
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, cpu, default: default(*x))
    assert hexadecimal(fingerprint(x)) == expected


def test_a_summary_is_exact_whatever_the_order():
    x = np.asarray(normal(0, (1000,), std=1e6))
    summary = summarise({"w": x, "n": 3}, "weights")
    shuffled = summarise({"w": np.random.RandomState(0).permutation(x)}, "weights")
    assert shuffled.total == summary.total == math.fsum(x.tolist())
    assert shuffled.fingerprint != summary.fingerprint
    assert str(summary) == (
        f"weights: sum {summary.total!r}, fingerprint {seen(x)} (1000 values in 1 arrays)"
    )


@pytest.mark.parametrize(
    ("tree", "total"),
    [
        ([jnp.float32(1e30), jnp.float32(1), jnp.float32(-1e30)], 1.0),
        ([np.float64(0.1), jnp.int32(2), np.bool_(True), jnp.bfloat16(1.5)], 4.6),
        ([jnp.complex64(1 - 2j), jnp.float32(3)], 4 - 2j),
        ([np.array([np.inf, 1]), jax.random.key(0)], math.inf),
        (np.array([np.inf, -np.inf]), math.nan),
        (jax.random.key(0), 0),
    ],
    ids=["cancelling", "mixed", "complex", "infinite", "both", "key"],
)
def test_sums(tree, total):
    np.testing.assert_equal(summarise(tree, "x").total, total)
    with pytest.raises(ValueError, match="no array"):
        summarise([], "x")
