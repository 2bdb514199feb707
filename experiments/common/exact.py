"""Computes normalisation and its gradients in extended precision, and the errors of answers.

`np.longdouble` has a mantissa of 64 bits on x86, and float32 one of 24. So the error of these
references is below 1e-12 in every case of the experiments.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

EPS = 1e-5  # the eps of every compared layer

# dweight = rstd sum(dy (x - mean)), and the variance may have an error of 5e-7. Together with
# roundings of root, division and product, the error is 4.3e-7 of dweight, which for few values
# is as large as the sum of |dy|.
RSTD_UNIT = 4.3


class Batch(NamedTuple):
    """Holds the inputs of a layer.

    For a batch norm, `x` is `[N, C, *spatial]` and weight and bias are `[C]`; for a layer norm
    `x` is `[N, *shape]`, and weight and bias are of `shape`.
    """

    x: NDArray
    dy: NDArray  # the cotangent of the output, with the shape and dtype of x
    weight: Any  # or `None`
    bias: Any


class Answer(NamedTuple):
    """Holds the outputs of a layer; an output that is missing or not compared is `None`."""

    y: Any
    variance: Any  # [C], or [N] for a layer norm
    dx: Any
    dweight: Any
    dbias: Any


class Errors(NamedTuple):
    """Holds the largest error of each output in its unit: NaN for `None`, infinity for a NaN.

    In half precision, errors of y and dx up to half an ulp do not count, because a correctly
    rounded answer has them, too.
    """

    y: float  # in units of max(1, |xhat|)
    variance: float  # in units of variance + eps
    dx: float  # in units of max |dy weight| / std
    # In units of the sum of |dy| plus RSTD_UNIT times |dweight|; if several rstd contribute, as
    # in a layer norm, RSTD_UNIT times the sum of the absolute contributions of each rstd.
    dweight: float
    dbias: float  # in units of the sum of |dy|


class Exact(NamedTuple):
    """Holds the exact answer, and the units of the errors."""

    answer: Answer
    units: Answer


def batch_norm(batch: Batch, mask: Any = None) -> Exact:
    """Returns the exact answer of a batch norm in training.

    In all references `mask` has the shape of `x`, with or without axis 1, and is false where x
    does not count.
    """
    axes = tuple(axis for axis in range(batch.x.ndim) if axis != 1)
    return _exact(batch, counted(batch, mask), axes, axes)


def layer_norm(batch: Batch, mask: Any = None, *, centred: bool = True) -> Exact:
    """Returns the exact answer of a layer norm; if not `centred`, of an RMS norm."""
    axes = tuple(range(1, batch.x.ndim))
    return _exact(batch, counted(batch, mask), axes, (0,), centred=centred)


def channel_norm(batch: Batch, mask: Any = None, *, centred: bool = True) -> Exact:
    """Returns the exact answer of a layer norm along axis 1; weight and bias are `[C]`."""
    axes = (0, *range(2, batch.x.ndim))
    return _exact(batch, counted(batch, mask), (1,), axes, centred=centred)


def group_norm(batch: Batch, groups: int, mask: Any = None) -> Exact:
    """Returns a group norm's exact answer, without the variance; weight and bias are `[C]`."""
    n, channels, *space = batch.x.shape

    def cut(values: NDArray) -> NDArray:
        return values.reshape(n, groups, channels // groups, *space)

    vectors = (
        None if values is None else values.reshape(groups, channels // groups)
        for values in (batch.weight, batch.bias)
    )
    axes = tuple(range(2, 3 + len(space)))
    counts = cut(counted(batch, mask))
    parts = _exact(Batch(cut(batch.x), cut(batch.dy), *vectors), counts, axes, (0, *axes[1:]))

    def joined(answer: Answer) -> Answer:
        y, dx = (
            np.broadcast_to(values, counts.shape).reshape(batch.x.shape)
            for values in (answer.y, answer.dx)
        )
        return Answer(y, None, dx, answer.dweight.ravel(), answer.dbias.ravel())

    return Exact(*map(joined, parts))


def standardised(
    x: Any, axes: Any, counted: Any = True, *, centred: bool = True
) -> tuple[Any, Any]:
    """Returns (x - mean) / sqrt(variance + EPS) and the variance of counted values, each along
    the axes, which are kept with size 1. If not `centred`, the mean is 0. Takes arrays of NumPy
    or of JAX; x is finite where it does not count, too, and so is the result."""
    count = (0 * x + counted).sum(axes, keepdims=True).clip(min=1)

    def mean(values: Any) -> Any:
        return (values * counted).sum(axes, keepdims=True) / count

    x = x - mean(x) if centred else x
    variance = mean(x**2)
    return x / (variance + EPS) ** 0.5, variance


def counted(batch: Batch, mask: Any) -> NDArray:
    """Returns whether each value of x counts."""
    shape = batch.x.shape
    is_whole = mask is None or np.shape(mask) == shape
    mask = np.True_ if mask is None else mask
    return np.broadcast_to(mask if is_whole else np.expand_dims(mask, 1), shape)


def _exact(
    batch: Batch,
    counted: NDArray,
    statistics: tuple[int, ...],
    parameters: tuple[int, ...],
    *,
    centred: bool = True,
) -> Exact:
    """Takes mean and variance over the axes `statistics`, and gradients of weight and bias over
    the axes `parameters`, of counted values. If not `centred`, the mean is 0."""
    count = np.maximum(counted.sum(statistics, keepdims=True), 1)

    def mean(values: NDArray) -> NDArray:
        return values.sum(statistics, keepdims=True) / count

    def centre(values: NDArray) -> NDArray:
        return np.where(counted, values - mean(values), 0) if centred else values

    x, dy = (
        np.where(counted, values, 0).astype(np.longdouble) for values in (batch.x, batch.dy)
    )
    weight, bias = (
        default if values is None else np.expand_dims(values, parameters)
        for values, default in ((batch.weight, 1), (batch.bias, 0))
    )
    # Centred twice: the second time removes the rounding of the first.
    xhat, variance = standardised(centre(x), statistics, counted, centred=centred)
    xhat, g = np.where(counted, xhat, 0), dy * weight
    rstd = 1 / np.sqrt(variance + np.longdouble(EPS))
    variance = variance.squeeze(statistics)
    sum_dy = np.abs(dy).sum(parameters)
    both = tuple(set(statistics) & set(parameters))  # axes with the same rstd
    of_each_rstd = np.abs((dy * xhat).sum(both, keepdims=True))
    answer = Answer(
        y=np.where(counted, xhat * weight + bias, 0),
        variance=variance,
        dx=rstd * (centre(g) - xhat * mean(g * xhat)),
        dweight=(dy * xhat).sum(parameters),
        dbias=dy.sum(parameters),
    )
    units = Answer(
        y=np.maximum(1, np.abs(xhat)),
        variance=variance + EPS,
        dx=np.abs(g).max(statistics, keepdims=True) * rstd,
        dweight=sum_dy + RSTD_UNIT * of_each_rstd.sum(parameters),
        dbias=sum_dy,
    )
    return Exact(answer, units)


def errors(batch: Batch, exact: Exact, answer: Answer) -> Errors:
    """Returns the errors of `answer`; if a sum is fully masked, its unit is 1."""

    def largest(name: str) -> float:
        actual, expected, unit = (getattr(values, name) for values in (answer, *exact))
        if actual is None:
            return np.nan
        error = np.abs(actual - expected)
        if name in ("y", "dx") and batch.x.dtype.itemsize == 2:
            error = np.maximum(error - half_ulp(expected, batch.x.dtype), 0)
        error = error / np.where(unit == 0, 1, unit)
        return float(np.where(np.isfinite(error), error, np.inf).max())

    return Errors(*map(largest, Errors._fields))


def half_ulp(values: NDArray, dtype: np.dtype) -> NDArray:
    """Returns the largest error of values that are correctly rounded to `dtype`."""
    info = jnp.finfo(dtype)
    normal = np.maximum(np.abs(values), np.longdouble(float(info.smallest_normal)))
    _, exponent = np.frexp(normal)  # 2^(exponent - 1) <= normal < 2^exponent
    return np.ldexp(np.longdouble(0.5), exponent - 1 - info.nmant)
