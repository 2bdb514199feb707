"""`summarise`: a whole tree in one line, to compare by eye."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._fingerprint import fingerprint, hexadecimal, is_array, is_numpy, words_of_numpy

_CHUNK = 2**16


class Summary(NamedTuple):
    """Of a tree: `print(summary)` gives the line."""

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
    """The sum of all values of a tree, and its fingerprint.

    The sum is that of the numbers as they are, rounded once to float64: like the fingerprint,
    and unlike a sum in floats, it does not depend on the order. But it does not depend on where
    a number is, either, so the fingerprint is what to go by.

    After the line "Sum of weights" in D. Riach, "Determinism in Deep Learning" (GTC 2019,
    S9911).

    **Arguments:**

    - `tree`: the weights, for example. What is no array is left out; keys count for the
        fingerprint only.
    - `name`: what the line begins with.

    **Returns:** a `Summary`, which prints as `weights: sum 3.25, fingerprint 0123456789abcdef
    (10 values in 2 arrays)`.

    **Raises:** `ValueError` where there is no array; `OverflowError` for a sum that float64
    cannot hold, or cannot on the way there.
    """
    arrays = [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]
    if not arrays:
        raise ValueError(f"summarise({tree!r}, {name!r}): there is no array in it.")
    numbers: list[Any] = [np.asarray(leaf) for leaf in arrays if not _is_key(leaf)]
    total: complex | float = _exact(x.real for x in numbers)
    if any(map(np.iscomplexobj, numbers)):
        total = complex(total, _exact(x.imag for x in numbers if np.iscomplexobj(x)))
    size = sum(leaf.size for leaf in arrays)
    # Of all arrays at once: operation by operation each shape is compiled several times.
    # NumPy's go in as words, since `jit` would narrow them.
    words = [words_of_numpy(leaf) if is_numpy(leaf) else leaf for leaf in arrays]
    bits = hexadecimal(jax.jit(fingerprint)(words))
    return Summary(name, total, bits, size, len(arrays))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _exact(arrays: Iterable[Any]) -> float:
    terms: list[Iterable[float]] = []
    not_finite = 0.0
    for x in arrays:
        if x.dtype.kind in "biu":
            terms.append(_as_floats(sum(x.reshape(-1).tolist())))
            continue
        with np.errstate(invalid="ignore"):
            not_finite += float(x[~np.isfinite(x)].sum(dtype=np.float64))
        terms.append(_in_parts(x.reshape(-1)))
    # No order of infinities and NaNs gives another sum.
    return not_finite if not_finite != 0 else math.fsum(itertools.chain(*terms))


def _in_parts(x: Any) -> Iterator[float]:
    """The values of an array as floats, of which there are never many at once."""
    for start in range(0, x.size, _CHUNK):
        yield from x[start : start + _CHUNK].astype(np.float64).tolist()


def _as_floats(integer: int) -> list[float]:
    """Whose sum it is: one float has 53 bits."""
    floats = []
    while integer:
        floats.append(float(integer))
        integer -= int(floats[-1])
    return floats
