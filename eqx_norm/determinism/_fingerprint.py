"""`fingerprint` sums the bits of an array to two integers, which no order of summing changes.

It is implemented by JAX, for values inside of a program, and by NumPy, for arrays that JAX
would narrow. `summarise` describes a whole tree in one line.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped, UInt32
from numpy.typing import NDArray

# Word j is salted with _FIRST + j * _STEP: a bijection, as the step is odd. The step is 2**32
# over the golden ratio, so that words near each other get salts far apart.
_FIRST, _STEP = np.uint32(0x243F6A88), 0x9E3779B9
# Keeps the term of the second sum from being 0 where a word is mixed to 0.
_SECOND = np.uint32(0x7F4A7C15)
# From the finaliser of MurmurHash3 (Appleby, public domain), which is a bijection.
_MIX_1, _MIX_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def fingerprint(tree: Any) -> UInt32[Array, "2"]:
    r"""Returns a fingerprint of the bits of an array, or of all arrays of a tree.

    Let $w_0, w_1, \ldots$ be the array's bits in words of 32, in row-major order (a narrower
    element is one word, a wider one several). Each is salted by its position, and mixed,

    $$s_j = c + k j \qquad a_j = \mathrm{mix}(w_j \oplus s_j)$$

    by a fixed bijection of the 32-bit words, with a fixed $c$ and a fixed, odd $k$. The
    fingerprint is

    $$\Big(\sum_j a_j, \; \sum_j (a_j + d) \, (s_j \mid 1)\Big) \bmod 2^{32}.$$

    Sums of integers are exact, so it depends neither on the order in which the device sums nor
    on how the array is sharded. A change in a single word always changes it, and any other goes
    unseen with a chance of about $2^{-60}$. Zeros of either sign and NaNs are told apart.

    The fingerprint of several arrays is that of the array of their fingerprints, in the order
    of the tree's leaves. It may be taken under `jax.jit` and `jax.vmap`.

    A NumPy array is taken on the host, so that its fingerprint does not depend on
    `jax_enable_x64`. But `jax.jit` and `jax.vmap` give `fingerprint` what they have made of
    it: without x64, 32 bits of 64.

    **Arguments:**

    - `tree`: arrays of any dtype, keys included. Other leaves are left out.

    **Returns:** two numbers of 32 bits; `hexadecimal` gives them as text.

    **Raises:** `ValueError` where there is no array; `TypeError` for a NumPy array of anything
    but numbers (objects, text, dates, records), or with a mask.
    """
    prints = [
        jnp.asarray(of_numpy(leaf)) if is_numpy(leaf) else of_array(leaf)
        for leaf in _arrays(tree, f"fingerprint({tree!r})")
    ]
    return prints[0] if len(prints) == 1 else of_array(jnp.stack(prints))


def hexadecimal(pair: UInt32[Array, "2"] | NDArray[np.uint32]) -> str:
    """Returns a fingerprint as 16 digits."""
    first, second = np.asarray(pair).tolist()
    return f"{first:08x}{second:08x}"


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array of JAX or NumPy. Tangents of integers have no bits."""
    return (eqx.is_array(leaf) or is_numpy(leaf)) and leaf.dtype != jax.dtypes.float0


def is_numpy(leaf: Any) -> bool:
    """Returns whether a leaf is an array or a scalar of NumPy, which JAX may narrow."""
    return isinstance(leaf, np.ndarray | np.generic)


def _arrays(tree: Any, call: str) -> list[Any]:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]
    if not arrays:
        raise ValueError(f"{call}: there is no array in it.")
    return arrays


def _both_terms(word: Any, salt: Any) -> tuple[Any, Any]:
    """Returns the terms of both sums, for words of JAX or NumPy."""
    mixed = word ^ salt
    mixed = (mixed ^ (mixed >> 16)) * _MIX_1
    mixed = (mixed ^ (mixed >> 13)) * _MIX_2
    mixed = mixed ^ (mixed >> 16)
    return mixed, (mixed + _SECOND) * (salt | np.uint32(1))


def _add(sums: tuple[Any, ...], terms: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(lax.add, sums, terms))


# --- By JAX.


def of_array(
    x: Shaped[Array, "..."],
    order: tuple[int, ...] | None = None,
    part: UInt32[Array, ""] | None = None,
) -> UInt32[Array, "2"]:
    """Returns the fingerprint of `x.transpose(order)`.

    With `part`, x is that part of an array which is cut up along its first axis: the parts'
    fingerprints add up to that of the whole.
    """
    words = _words(x)
    order = tuple(range(x.ndim)) if order is None else order
    strides, size = [0] * words.ndim, 1
    for axis in reversed((*order, *range(x.ndim, words.ndim))):
        strides[axis], size = size, size * words.shape[axis]
    start = jnp.asarray(_FIRST)
    if part is not None:
        start = start + part * _salts(size)

    def on_cpu(words: Array, start: Array) -> Array:
        # Channels last, which is XLA:CPU's layout for convolutions: its loops follow the order
        # of the axes, not the layout, and are 4 times as slow across the layout as along it.
        axes = (0, *range(2, words.ndim), 1) if words.ndim > 3 else tuple(range(words.ndim))
        terms = _terms(words.transpose(axes), [strides[axis] for axis in axes], start)
        # Both sums in one pass are 2 to 3 times as fast as two passes. Rows are summed first,
        # since XLA sums to a single number on one core only.
        for summed in (tuple(range(1, words.ndim)), tuple(range(words.ndim))[:1]):
            if summed:
                terms = lax.reduce(terms, (np.uint32(0), np.uint32(0)), _add, summed)
        return jnp.stack(terms)

    def elsewhere(words: Array, start: Array) -> Array:
        # On a GPU, XLA fuses two sums into one pass; for a sum of pairs it stores the pairs.
        axes = tuple(range(words.ndim))
        terms = _terms(words, strides, start)
        return jnp.stack([lax.reduce(term, np.uint32(0), lax.add, axes) for term in terms])

    return lax.platform_dependent(words, start, cpu=on_cpu, default=elsewhere)


def _words(x: Array) -> Array:
    """Returns the bits of each element, with one more axis where they take several words."""
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


def _salts(words: int) -> np.uint32:
    """Returns by how much the salt grows over so many words."""
    return np.uint32(words * _STEP % 2**32)


def _terms(words: Array, strides: Sequence[int], start: Array) -> tuple[Array, Array]:
    """Returns the terms of both sums. The strides are those of the words in row-major order."""
    # One term an axis: a position in a flattened array would make XLA move a sharded array.
    salt = jnp.broadcast_to(start, words.shape)
    for axis, stride in enumerate(strides):
        salt = salt + lax.broadcasted_iota(jnp.uint32, words.shape, axis) * _salts(stride)
    return _both_terms(words, salt)


# --- By NumPy.


def of_numpy(x: NDArray[Any] | np.generic) -> UInt32[np.ndarray, "2"]:
    """Returns the fingerprint of an array on the host, without JAX: it needs no device."""
    words = words_of_numpy(x)
    salt = np.arange(words.size, dtype=np.uint64) * np.uint64(_STEP)
    terms = _both_terms(words, salt.astype(np.uint32) + _FIRST)
    return np.array([term.sum(dtype=np.uint32) for term in terms])


def words_of_numpy(x: NDArray[Any] | np.generic) -> UInt32[np.ndarray, " words"]:
    """Returns the bits of each element in row-major order, as many words as it takes."""
    is_number = jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
    is_wide = x.dtype.itemsize > (16 if x.dtype.kind == "c" else 8)
    if not is_number or x.dtype.kind == "m" or is_wide:
        raise TypeError(
            f"fingerprint: a NumPy array of dtype {x.dtype} is none of numbers that JAX knows. "
            "Leave it out, or turn it into one (for text, its bytes as uint8)."
        )
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("fingerprint: what x.mask says would go unseen. Give x.filled().")
    x = np.ascontiguousarray(x, x.dtype.newbyteorder("<")).reshape(-1)
    if x.dtype.itemsize >= 4:
        return x.view(np.uint32)
    words = x.view(f"uint{8 * x.dtype.itemsize}").astype(np.uint32)
    if x.dtype.itemsize == 1 and x.dtype != bool:
        # A byte that holds 4 bits has 4 more, which mean nothing.
        words &= np.uint32(2 ** jax.dtypes.itemsize_bits(x.dtype) - 1)
    return words


# --- The sum of a tree, to compare by eye.


class Summary(NamedTuple):
    """Holds the sum and the fingerprint of a tree: `print(summary)` gives the line."""

    name: str
    total: complex | float
    fingerprint: str
    values: int
    arrays: int

    def __str__(self) -> str:
        return (
            f"{self.name}: sum {self.total!r}, fingerprint {self.fingerprint} "
            f"({self.values} values in {self.arrays} arrays)"
        )


def summarise(tree: Any, name: str) -> Summary:
    """Returns the sum of all values of a tree, and its fingerprint.

    The sum is exact, and rounded once to float64, so that it does not depend on the order of
    summing. It does not depend on where a number is, either: the fingerprint does.

    After the line "Sum of weights" in D. Riach, "Determinism in Deep Learning" (GTC 2019,
    S9911).

    **Arguments:**

    - `tree`: the weights, for example. Leaves that are no arrays are left out; keys count for
        the fingerprint only.
    - `name`: what the line begins with.

    **Returns:** a `Summary`, which prints as `weights: sum 3.25, fingerprint 0123456789abcdef
    (10 values in 2 arrays)`.

    **Raises:** `ValueError` where there is no array; `OverflowError` for a sum that float64
    cannot hold, or cannot on the way there.
    """
    arrays = _arrays(tree, f"summarise({tree!r}, {name!r})")
    keys = jax.dtypes.prng_key
    numbers: list[Any] = [np.asarray(x) for x in arrays if not jnp.issubdtype(x.dtype, keys)]
    total: complex | float = _exact(x.real for x in numbers)
    if any(map(np.iscomplexobj, numbers)):
        total = complex(total, _exact(x.imag for x in numbers if np.iscomplexobj(x)))
    # All in one program, since each operation would be compiled for each shape. NumPy's arrays
    # go in as words, since `jit` would narrow them.
    words = [words_of_numpy(leaf) if is_numpy(leaf) else leaf for leaf in arrays]
    bits = hexadecimal(jax.jit(fingerprint)(words))
    return Summary(name, total, bits, sum(leaf.size for leaf in arrays), len(arrays))


def _exact(arrays: Iterable[Any]) -> float:
    """Returns the sum of all values, rounded once."""
    terms = []
    for x in arrays:
        if x.dtype in (np.int64, np.uint64):  # in halves, which float64 holds
            x = np.stack([x >> 32 << 32, x & (2**32 - 1)])
        terms.append(map(float, x.flat))  # one after the other: never all in memory
    try:
        return math.fsum(itertools.chain.from_iterable(terms))
    except ValueError:  # infinities of both signs
        return math.nan
