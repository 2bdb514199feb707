"""Tests that a fingerprint agrees with its formula, and depends on each bit and its place."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.determinism import fingerprint, summarise
from eqx_norm.determinism._fingerprint import hexadecimal
from tests.helpers import normal


def seen(tree):
    return hexadecimal(fingerprint(tree))


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float64", "complex128"])
def test_it_is_that_of_the_formula_and_no_flipped_bit_goes_unseen(dtype, monkeypatch):
    width = np.dtype(jnp.dtype(dtype)).itemsize
    raw = np.random.RandomState(0).randint(0, 256, (24, width)).astype(np.uint8)
    raw[:2] = [[0], [255]]  # a zero, whose sign is flipped, and a NaN, whose payload is
    expected = by_the_formula(raw.view(f"uint{8 * min(width, 4)}").flat)
    array = raw.view(jnp.dtype(dtype)).reshape(2, 3, 2, 2)
    assert seen(array) == expected  # of NumPy, without x64
    flips = np.packbits(np.eye(8 * raw.size, dtype=bool), axis=1)
    copies = (raw.reshape(-1) ^ flips).view(jnp.dtype(dtype)).reshape(-1, *array.shape)
    with jax.enable_x64(width > 4):
        assert seen(jnp.asarray(array)) == expected
        prints = np.asarray(jax.jit(jax.vmap(fingerprint))(jnp.asarray(copies)))
    assert expected not in map(hexadecimal, prints)
    # The sum for other devices than a CPU.
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, cpu, default: default(*x))
    assert seen(array) == expected


def test_of_keys_few_bits_and_trees():
    keys = jax.random.split(jax.random.key(0), 4)
    assert seen(keys) == by_the_formula(np.asarray(jax.random.key_data(keys)).flat)
    assert seen(jnp.arange(-8, 8).astype("int4")) == by_the_formula(np.arange(-8, 8) % 16)
    assert seen(jnp.array([True, False, True])) == by_the_formula([1, 0, 1])
    a, b = normal(0, (3,)), np.arange(12.0).reshape(3, 4).T[::2]  # of 64 bits, and strided
    of_b = by_the_formula(np.ascontiguousarray(b).view(np.uint32).flat)
    assert seen([b]) == summarise(b, "b").fingerprint == of_b
    assert seen({"a": a, "b": [b, None]}) == seen(jnp.stack([fingerprint(a), fingerprint(b)]))
    with pytest.raises(ValueError, match="the tree has no array"):
        fingerprint({"a": 1.0})


def test_a_summary_is_exact_whatever_the_order():
    x = np.asarray(normal(0, (1000,), std=1e6))
    summary = summarise({"w": x, "n": 3}, "weights")
    shuffled = summarise({"w": np.random.RandomState(0).permutation(x)}, "weights")
    assert shuffled.total == summary.total == math.fsum(x.tolist())
    assert shuffled.fingerprint != summary.fingerprint
    says = f"fingerprint {seen(x)} (1000 values in 1 arrays)"
    assert str(summary) == f"weights: sum {summary.total!r}, {says}"
    mixed = [np.float64(0.1), jnp.complex64(1 - 2j), jnp.bfloat16(1.5), jax.random.key(0)]
    assert summarise(mixed, "x").total == 2.6 - 2j
