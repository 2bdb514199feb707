"""Tests that a fingerprint equals its formula, and depends on each bit and its position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.determinism import fingerprint
from eqx_norm.determinism._fingerprint import hexadecimal
from tests.compiling import jit
from tests.helpers import normal

UNOPTIMISED = True  # compares values: tests/compiling.py


def digits(tree):
    # The tree is no argument, because JAX would round numbers of 64 bits.
    return hexadecimal(jit(lambda: fingerprint(tree))())


def by_the_formula(words):
    """Returns the fingerprint of words of 32 bits, calculated by NumPy."""
    words = np.asarray(words, np.uint32)
    salt = (0x243F6A88 + np.arange(words.size) * 0x9E3779B9).astype(np.uint32)
    mixed = words ^ salt
    mixed = (mixed ^ mixed >> 16) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> 13) * np.uint32(0xC2B2AE35)
    mixed = mixed ^ mixed >> 16
    second = (mixed + np.uint32(0x7F4A7C15)) * (salt | 1)
    return hexadecimal(np.array([mixed.sum(dtype=np.uint32), second.sum(dtype=np.uint32)]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128"])
def test_fingerprint_equals_the_formula_and_changes_with_every_bit(dtype, monkeypatch):
    width = np.dtype(jnp.dtype(dtype)).itemsize
    raw = np.random.RandomState(0).randint(0, 256, (24, width)).astype(np.uint8)
    raw[:2] = [[0], [255]]  # flips change the sign of a 0, and the payload of a NaN
    expected = by_the_formula(raw.view(f"uint{8 * min(width, 4)}").flat)
    array = raw.view(jnp.dtype(dtype)).reshape(2, 3, 2, 2)
    assert digits(array) == expected  # a NumPy array, without x64
    flips = np.packbits(np.eye(8 * raw.size, dtype=bool), axis=1)
    copies = (raw.reshape(-1) ^ flips).view(jnp.dtype(dtype)).reshape(-1, *array.shape)
    with jax.enable_x64(width > 4):
        assert digits(jnp.asarray(array)) == expected
        prints = np.asarray(jit(jax.vmap(fingerprint))(jnp.asarray(copies)))
    assert expected not in map(hexadecimal, prints)
    # The variant of the sum for devices other than a CPU.
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, cpu, default: default(*x))
    assert digits(array) == expected


def test_fingerprint_of_keys_small_dtypes_and_pytrees():
    keys = jax.random.split(jax.random.key(0), 4)
    assert digits(keys) == by_the_formula(np.asarray(jax.random.key_data(keys)).flat)
    assert digits(jnp.arange(-8, 8).astype("int4")) == by_the_formula(np.arange(-8, 8) % 16)
    assert digits(jnp.array([True, False, True])) == by_the_formula([1, 0, 1])
    a, b = normal(0, (3,)), np.arange(12.0).reshape(3, 4).T[::2]  # b: 64 bits, strided
    assert digits([b]) == by_the_formula(np.ascontiguousarray(b).view(np.uint32).flat)
    tree = {"a": a, "b": [b, None], "c": jnp.sin}
    assert digits(tree) == digits(jnp.stack([fingerprint(a), fingerprint(b)]))
    for tree, error in (({"a": 1.0}, "no array"), (np.ma.masked_less(b, 3), "masked arrays")):
        with pytest.raises(ValueError, match=error):
            fingerprint(tree)
