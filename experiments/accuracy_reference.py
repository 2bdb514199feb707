"""Normalisation in extended precision, and how far an answer is from it.

`np.longdouble` has a mantissa of 64 bits on x86, where float32 has 24: its own error is below
1e-12 in every case here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from .accuracy_cases import EPS, Batch


class Answer(NamedTuple):
    """What a layer gives for a batch: y and dx are [N, C, ...], the others [C]."""

    y: NDArray
    variance: NDArray
    dx: NDArray
    dweight: NDArray
    dbias: NDArray


# dweight = rstd sum(dy (x - mean)), and rstd is a rounded root of a variance that may be off
# by 5e-7: with the roundings of root, division and product, 4.3e-7 of dweight, which with few
# values is as large as the sum of |dy|.
RSTD_UNIT = 4.3


class Errors(NamedTuple):
    """The largest error of each, on the scale of the bounds; NaN where the layer raised.

    In half precision, y and dx are allowed half an ulp of the dtype of the input, which is
    what a correctly rounded answer may be off by; what exceeds it is counted.
    """

    y: float  # in units of max(1, |xhat|)
    variance: float  # of variance + eps
    dx: float  # of max |dy| * weight / std
    dweight: float  # of the sum of |dy|, and RSTD_UNIT of itself
    dbias: float  # of the sum of |dy|
    nonfinite: float  # how many numbers are NaN or infinite, of all five together


def worst(found: Sequence[Errors]) -> Errors:
    """Of several batches; of `nonfinite`, all of them together."""
    columns = Errors(*np.array(found).T)
    together = Errors(*(float(np.max(column)) for column in columns))
    return together._replace(nonfinite=float(np.sum(columns.nonfinite)))


FAILED = Errors(*(np.nan,) * len(Errors._fields))


class Reference(NamedTuple):
    answer: Answer
    xhat: NDArray


def reference(batch: Batch) -> Reference:
    x, dy = _by_channel(batch.x), _by_channel(batch.dy)
    weight, bias = (v.astype(np.longdouble)[:, None] for v in (batch.weight, batch.bias))
    mean = x.mean(axis=1, keepdims=True)
    deviation = x - mean
    variance = (deviation**2).mean(axis=1, keepdims=True)
    rstd = 1 / np.sqrt(variance + np.longdouble(EPS))
    xhat = deviation * rstd
    product = dy * xhat
    dx = dy - dy.mean(axis=1, keepdims=True) - xhat * product.mean(axis=1, keepdims=True)
    answer = Answer(
        y=xhat * weight + bias,
        variance=variance[:, 0],
        dx=weight * rstd * dx,
        dweight=product.sum(axis=1),
        dbias=dy.sum(axis=1),
    )
    return Reference(answer, xhat)


def errors(batch: Batch, right: Reference, given: Answer) -> Errors:
    """How far `given` is from `right`."""
    exact, dy = right.answer, np.abs(_by_channel(batch.dy))
    std = np.sqrt(exact.variance + EPS)
    sum_dy = dy.sum(axis=1)
    dweight_unit = sum_dy + RSTD_UNIT * np.abs(exact.dweight)
    dx_unit = dy.max(axis=1) * batch.weight / std
    y_off = np.abs(_by_channel(given.y) - exact.y)
    dx_off = np.abs(_by_channel(given.dx) - exact.dx)
    if batch.x.dtype != np.float32:
        y_off = np.maximum(y_off - half_ulp(exact.y, batch.x.dtype), 0)
        dx_off = np.maximum(dx_off - half_ulp(exact.dx, batch.x.dtype), 0)
    return Errors(
        y=_largest(y_off / np.maximum(1, np.abs(right.xhat))),
        variance=_largest(np.abs(given.variance - exact.variance) / (exact.variance + EPS)),
        dx=_largest(dx_off / dx_unit[:, None]),
        dweight=_largest(np.abs(given.dweight - exact.dweight) / dweight_unit),
        dbias=_largest(np.abs(given.dbias - exact.dbias) / sum_dy),
        nonfinite=float(sum(np.sum(~np.isfinite(values)) for values in given)),
    )


def _by_channel(values: NDArray) -> NDArray[np.longdouble]:
    """[N, C, ...] as [C, n]."""
    channels = values.shape[1]
    return np.moveaxis(values, 1, 0).reshape(channels, -1).astype(np.longdouble)


def _largest(off: NDArray) -> float:
    """A NaN is as wrong as can be; only a layer that raised has an error of NaN."""
    return float(np.max(np.where(np.isfinite(off), off, np.inf)))


def half_ulp(values: NDArray, dtype: np.dtype) -> NDArray:
    """What a correctly rounded value may be off by in `dtype`."""
    info = jnp.finfo(dtype)
    _, exponent = np.frexp(values)  # values = mantissa * 2^exponent, 0.5 <= |mantissa| < 1
    lowest = np.where(values == 0, info.minexp, exponent - 1)
    return np.ldexp(np.longdouble(0.5), np.maximum(lowest, info.minexp) - info.nmant)
