"""Defines `fingerprint`, a checksum of bits that does not depend on the order of summation."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree, Shaped, UInt32

# Word j is salted with _FIRST + j * _STEP: a bijection, as the step is odd. The step is 2**32
# over the golden ratio, so that neighbouring words get salts that differ widely.
_FIRST, _STEP = np.uint32(0x243F6A88), 0x9E3779B9
# _SECOND makes the term of the second sum nonzero for a word that is mixed to 0.
_SECOND = np.uint32(0x7F4A7C15)
# The mixing is the finaliser of MurmurHash3 (Appleby, public domain), which is a bijection.
_MIX_1, _MIX_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_DTYPES_OF_64_BITS = ("int64", "uint64", "float64", "complex128")


def fingerprint(tree: Any) -> UInt32[Array, "2"]:
    r"""Returns a fingerprint of the bits of an array, or of all arrays of a pytree.

    Let $w_0, w_1, \ldots$ be the array's bits as 32-bit words in row-major order (a narrower
    element is one word, a wider one several), $s_j = c + k j$ with constants $c$ and odd $k$,
    and $a_j = \mathrm{mix}(w_j \oplus s_j)$ with a fixed bijection. The fingerprint is

    $$\Big(\sum_j a_j, \; \sum_j (a_j + d) \, (s_j \mid 1)\Big) \bmod 2^{32}.$$

    Sums of integers are exact, so the fingerprint does not depend on the order of summation or
    on the sharding. A change of a single word always changes it; any other change goes
    unnoticed with a probability of about $2^{-60}$. Zeros of different sign are distinguished,
    and so are NaNs of different bits.

    The fingerprint of a pytree with several arrays is the fingerprint of the array of their
    fingerprints, in the order of the leaves. It covers all 64 bits of NumPy's arrays, but under
    `jax.jit` or `jax.vmap` without `jax_enable_x64` JAX passes only 32 bits.

    **Arguments:**

    - `tree`: arrays of any shape and dtype, including keys. Other leaves are ignored.

    **Returns:** two integers, of shape `(2,)` and dtype uint32.

    **Raises:** `ValueError` if there is no array, and for a masked array; `TypeError` for a
    NumPy array whose dtype JAX lacks (objects, text, dates).
    """
    arrays = [_in_32_bits(leaf) for leaf in jax.tree.leaves(tree) if is_array(leaf)]
    if not arrays:
        raise ValueError(f"fingerprint({tree!r}): the tree has no array, so it has no bits.")
    prints = [of_array(jnp.asarray(array)) for array in arrays]
    return prints[0] if len(prints) == 1 else of_array(jnp.stack(prints))


def hexadecimal(pair: UInt32[Array | np.ndarray, "2"]) -> str:
    """Returns a fingerprint as 16 digits."""
    first, second = np.asarray(pair).tolist()
    return f"{first:08x}{second:08x}"


def is_array(leaf: PyTree) -> bool:
    """Returns whether a leaf is an array of JAX or NumPy with bits, so not a float0 tangent."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return False
    return leaf.dtype != jax.dtypes.float0


def _in_32_bits(
    x: Shaped[Array | np.ndarray | np.generic, "..."],
) -> Shaped[Array | np.ndarray | np.generic, "..."]:
    """Returns NumPy's 64-bit numbers as 32-bit words, because JAX without x64 would round."""
    if isinstance(x, jax.Array | np.ma.MaskedArray):
        return x  # JAX refuses an array with a mask
    if x.dtype.name not in _DTYPES_OF_64_BITS:
        return x
    return np.ascontiguousarray(x, x.dtype.name).reshape(*x.shape, 1).view(np.uint32)


def of_array(
    x: Shaped[Array, "..."], shard: UInt32[Array, ""] | None = None
) -> UInt32[Array, "2"]:
    """Returns the fingerprint of an array.

    With `shard`, `x` is the shard with this number of an array split along its first axis. The
    sum of the shards' fingerprints is the fingerprint of the array.
    """
    words = _words(x)
    strides = [math.prod(words.shape[axis + 1 :]) for axis in range(words.ndim)]
    start = jnp.asarray(_FIRST)
    if shard is not None:
        start = start + shard * np.uint32(words.size * _STEP % 2**32)

    def add_both(
        sums: Sequence[UInt32[Array, ""]], terms: Sequence[UInt32[Array, ""]]
    ) -> tuple[UInt32[Array, ""], ...]:
        return tuple(map(lax.add, sums, terms))

    def on_cpu(words: UInt32[Array, "..."], start: UInt32[Array, ""]) -> UInt32[Array, "2"]:
        axes = tuple(range(words.ndim))
        if words.ndim > 3:
            # The channels are last, as in XLA:CPU's layout for convolutions: XLA's loops follow
            # the order of the axes, and loops against the layout take 4 times as long.
            axes = (0, *axes[2:], 1)
        terms = _terms(words.transpose(axes), [strides[axis] for axis in axes], start)
        # Both sums in one pass are 2 to 3 times as fast as two passes. Rows are summed first,
        # since XLA reduces to a single number on one core only.
        zeros = (np.uint32(0), np.uint32(0))
        if words.ndim > 1:
            terms = lax.reduce(terms, zeros, add_both, tuple(range(1, words.ndim)))
        if words.ndim > 0:
            terms = lax.reduce(terms, zeros, add_both, (0,))
        return jnp.stack(terms)

    def elsewhere(words: UInt32[Array, "..."], start: UInt32[Array, ""]) -> UInt32[Array, "2"]:
        # On a GPU, XLA fuses two sums into one pass; for a sum of pairs it materialises pairs.
        axes = tuple(range(words.ndim))
        terms = _terms(words, strides, start)
        return jnp.stack([lax.reduce(term, np.uint32(0), lax.add, axes) for term in terms])

    return lax.platform_dependent(words, start, cpu=on_cpu, default=elsewhere)


def _words(x: Shaped[Array, "..."]) -> UInt32[Array, "..."]:
    """Returns each element's bits as a uint32, or as several along one more axis."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return _words(jax.random.key_data(x))
    if jnp.iscomplexobj(x):
        return _words(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    size = jax.dtypes.itemsize_bits(x.dtype)
    if size >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, getattr(jnp, f"uint{size}")).astype(jnp.uint32)


def _terms(
    words: UInt32[Array, "*shape"], strides: Sequence[int], start: UInt32[Array, ""]
) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """Returns the terms of both sums. The strides are those of the words in row-major order."""
    # A term for each axis: positions in a flattened array would make XLA reshard the array.
    salt = jnp.broadcast_to(start, words.shape)
    for axis, stride in enumerate(strides):
        step = np.uint32(stride * _STEP % 2**32)
        salt = salt + lax.broadcasted_iota(jnp.uint32, words.shape, axis) * step
    mixed = words ^ salt
    mixed = (mixed ^ (mixed >> 16)) * _MIX_1
    mixed = (mixed ^ (mixed >> 13)) * _MIX_2
    mixed = mixed ^ (mixed >> 16)
    return mixed, (mixed + _SECOND) * (salt | np.uint32(1))
