"""By how much two arrays differ, in words."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray


def difference(a: NDArray[Any], b: NDArray[Any]) -> str:
    """Of two arrays of one dtype: how many elements, where the first is, and how far they are
    apart at most; in ulps as well, for floats."""
    if a.shape != b.shape:
        if a.size != b.size:
            return f"shapes {a.shape} and {b.shape}"
        b = b.reshape(a.shape)
    differs = _bits(a) != _bits(b)
    differs = differs.reshape(*a.shape, -1).any(axis=-1)
    first = tuple(map(int, np.argwhere(differs)[0])) if differs.any() else ()
    lines = [
        f"{differs.sum()} of {a.size} elements differ",
        f"the first is [{', '.join(map(str, first))}]: {a[first]!s} and {b[first]!s}",
    ]
    x, y = _parts(a[differs]), _parts(b[differs])
    if jnp.issubdtype(x.dtype, jnp.floating):
        finite = np.isfinite(x.astype(np.float64)) & np.isfinite(y.astype(np.float64))
        if not finite.all():
            lines.append(f"{int((~finite).sum())} of them are not finite in one or both")
        x, y = x[finite], y[finite]
        if x.size:
            with np.errstate(over="ignore"):  # inf, for those at both ends of float64
                apart = np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
            lines.append(f"max difference {apart:.6g}, {_ulps(x, y)} ulp")
    elif x.dtype != bool:
        apart = max(abs(int(p) - int(q)) for p, q in zip(x.flat, y.flat, strict=True))
        lines.append(f"max difference {apart}")
    return "; ".join(lines)


def _parts(x: Any) -> NDArray[Any]:
    """Real and imaginary parts as numbers of their own."""
    return np.stack([x.real, x.imag]) if np.iscomplexobj(x) else x


def _bits(x: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(x.size, -1)


def _ulps(x: NDArray[Any], y: NDArray[Any]) -> int:
    """How many numbers of the dtype lie between them at most, the one end included."""
    size = jnp.finfo(x.dtype).bits
    unsigned = np.dtype(f"uint{max(size, 8)}")
    sign = np.uint64(1) << np.uint64(size - 1)
    bits = [np.ascontiguousarray(v).view(unsigned).astype(np.uint64) for v in (x, y)]
    magnitudes = [v & (sign - np.uint64(1)) for v in bits]
    high, low = np.maximum(*magnitudes), np.minimum(*magnitudes)
    alike = (bits[0] & sign) == (bits[1] & sign)
    return int(np.where(alike, high - low, high + low).max())
