"""Whether the contestants of the benchmark compute the same thing, compared with NumPy in
float64. A race between programs with different results has no winner."""

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from .benchmark_layers import DTYPES, EPS, Numbers, Outputs

# Of y and dx, whose values are of order 1, absolutely. bf16 has 8 bits: values up to 6 are
# rounded by up to 2^-6, several times on the way.
TOLERANCE = {"f32": 1e-4, "bf16": 0.1}


def _exact(given: Numbers, dtype: str) -> tuple[Outputs, NDArray[np.float64]]:
    """The results, and what goes into the ReLU."""

    def seen(a: NDArray[np.float32]) -> NDArray[np.float64]:
        """As the contestant sees it."""
        return np.asarray(jnp.asarray(a).astype(DTYPES[dtype]), np.float64)

    n, c = given.x.shape[:2]
    x, dy = (seen(a).reshape(n, c, -1) for a in (given.x, given.dy))
    weight, bias = (a.astype(np.float64)[:, None] for a in (given.weight, given.bias))
    mean, variance = (f(x, axis=(0, 2))[:, None] for f in (np.mean, np.var))
    rstd = 1 / np.sqrt(variance + EPS)
    normalised = (x - mean) * rstd
    before = normalised * weight + bias
    dz = np.where(before > 0, dy, 0)
    dbias, dweight = (a.sum((0, 2))[:, None] for a in (dz, dz * normalised))
    values = n * x.shape[2]
    dx = weight * rstd * (dz - (dbias + normalised * dweight) / values)
    shape = given.x.shape
    outputs = Outputs(
        np.maximum(before, 0).reshape(shape), dx.reshape(shape), dweight[:, 0], dbias[:, 0]
    )
    return outputs, before.reshape(shape)


class Agreement:
    """How far results for these numbers are from the exact ones."""

    def __init__(self, given: Numbers, dtype: str) -> None:
        self.tolerance = TOLERANCE[dtype]
        self._exact, before = _exact(given, dtype)
        # Around zero, rounding decides which side of the ReLU a value is on.
        self._sure = np.abs(before) > self.tolerance
        # The gradients in weight and bias are sums over so many values.
        self._values = given.x.size / given.weight.size

    def deviation(self, outputs: Outputs) -> float:
        """The largest, over all four results; those of the sums per value summed."""
        y, dx, dweight, dbias = (
            np.abs(a - b) for a, b in zip(outputs, self._exact, strict=True)
        )
        largest = (
            y.max(),
            dx.max(where=self._sure, initial=0.0),
            dweight.max() / self._values,
            dbias.max() / self._values,
        )
        return float(np.nan_to_num(np.max(largest), nan=np.inf))
