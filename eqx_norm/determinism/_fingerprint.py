"""The fingerprint of an array: two integer sums, in which the order does not matter."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped, UInt32
from numpy.typing import NDArray

# Word j is salted with _FIRST + j * _STEP: a bijection, as the step is odd. It is 2**32 over
# the golden ratio, so that words near each other get salts far apart.
_FIRST, _STEP = np.uint32(0x243F6A88), 0x9E3779B9
# A word may happen to be mixed to 0; its part of the second sum is then not 0 as well.
_SECOND = np.uint32(0x7F4A7C15)
# Of the finaliser of MurmurHash3 (Appleby, public domain), a bijection.
_MIX_1, _MIX_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def fingerprint(tree: Any) -> UInt32[Array, "2"]:
    r"""A fingerprint of the bits of an array, or of all arrays of a tree.

    Let $w_0, w_1, \ldots$ be the array's bits in words of 32, in row-major order (a narrower
    element is one word, a wider one several). Each is salted by its position, and mixed,

    $$s_j = c + k j \qquad a_j = \mathrm{mix}(w_j \oplus s_j)$$

    with $c$ and an odd $k$ that are fixed, and a fixed bijection of the 32-bit words. The
    fingerprint is

    $$\Big(\sum_j a_j, \; \sum_j (a_j + d) \, (s_j \mid 1)\Big) \bmod 2^{32}.$$

    Sums of integers are exact, so it depends neither on the order in which the device sums nor
    on how the array is sharded. It depends on each bit and on where it is: a change in a single
    word always changes it, and any other goes unseen with a chance of about $2^{-60}$. Zeros
    of either sign and NaNs are told apart by their bits.

    The fingerprint of several arrays is that of the array of their fingerprints, in the order
    of the tree's leaves. It may be taken under `jax.jit` and `jax.vmap`.

    **Arguments:**

    - `tree`: arrays of any dtype, keys included. What is no array is left out.

    **Returns:** two numbers of 32 bits; `hexadecimal` gives them as text.

    **Raises:** `ValueError` where there is no array.
    """
    prints = [of_array(jnp.asarray(leaf)) for leaf in jax.tree.leaves(tree) if is_array(leaf)]
    if not prints:
        raise ValueError(f"fingerprint({tree!r}): there is no array in it.")
    return prints[0] if len(prints) == 1 else of_array(jnp.stack(prints))


def hexadecimal(pair: UInt32[Array, "2"] | NDArray[np.uint32]) -> str:
    """A fingerprint as 16 digits."""
    first, second = np.asarray(pair).tolist()
    return f"{first:08x}{second:08x}"


def is_array(leaf: Any) -> bool:
    """Whether it has bits to take: JAX's and NumPy's arrays, but no tangents of integers."""
    is_any = eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.generic)
    return is_any and leaf.dtype != jax.dtypes.float0


def of_array(
    x: Shaped[Array, "..."],
    order: tuple[int, ...] | None = None,
    part: UInt32[Array, ""] | None = None,
) -> UInt32[Array, "2"]:
    """Of `x.transpose(order)`, or as the given part of an array which is cut up along its first
    axis into parts like `x`: the fingerprint of the whole is the sum of those of its parts."""
    words = _words(x)
    order = tuple(range(x.ndim)) if order is None else order
    strides, size = [0] * words.ndim, 1
    for axis in reversed((*order, *range(x.ndim, words.ndim))):
        strides[axis], size = size, size * words.shape[axis]
    start = jnp.asarray(_FIRST)
    if part is not None:
        start = start + part * _salts(size)

    def on_cpu(words: Array, start: Array) -> Array:
        # Channels last, as XLA:CPU has what it convolves: its loops follow the axes as they are
        # named here, whatever the layout, and are 4 times as slow across it as along it.
        axes = (0, *range(2, words.ndim), 1) if words.ndim > 3 else tuple(range(words.ndim))
        terms = _terms(words.transpose(axes), [strides[axis] for axis in axes], start)
        # Both sums in one pass, 2 to 3 times as fast as one after the other; and row by row at
        # first, since it takes a sum of all to a single number on one core only.
        for summed in (tuple(range(1, words.ndim)), tuple(range(words.ndim))[:1]):
            if summed:
                terms = lax.reduce(terms, (np.uint32(0), np.uint32(0)), _add, summed)
        return jnp.stack(terms)

    def elsewhere(words: Array, start: Array) -> Array:
        # On a GPU it is one pass if they are two: of a sum of pairs it would store the pairs.
        axes = tuple(range(words.ndim))
        terms = _terms(words, strides, start)
        return jnp.stack([lax.reduce(term, np.uint32(0), lax.add, axes) for term in terms])

    return lax.platform_dependent(words, start, cpu=on_cpu, default=elsewhere)


def _salts(words: int) -> np.uint32:
    """How far the salt goes over so many words."""
    return np.uint32(words * _STEP % 2**32)


def _terms(words: Array, strides: Sequence[int], start: Array) -> tuple[Array, Array]:
    """What is to be summed. The strides are those of the words in row-major order."""
    # One term an axis, rather than the position in a flattened array, so that XLA can leave a
    # sharded array where it is.
    salt = jnp.broadcast_to(start, words.shape)
    for axis, stride in enumerate(strides):
        salt = salt + lax.broadcasted_iota(jnp.uint32, words.shape, axis) * _salts(stride)
    mixed = _mix(words ^ salt)
    return mixed, (mixed + _SECOND) * (salt | np.uint32(1))


def _add(sums: tuple[Any, ...], terms: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(lax.add, sums, terms))


def _words(x: Array) -> Array:
    """The bits of each element; further axes at the end where it has more than 32."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return _words(jax.random.key_data(x))
    if jnp.iscomplexobj(x):
        return _words(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    size = (jnp.finfo if is_float else jnp.iinfo)(x.dtype).bits
    if size >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, getattr(jnp, f"uint{size}")).astype(jnp.uint32)


def _mix(word: Array) -> Array:
    word = (word ^ (word >> 16)) * _MIX_1
    word = (word ^ (word >> 13)) * _MIX_2
    return word ^ (word >> 16)
