"""The gradients of weight and bias over shapes of 1 to 4 dimensions, against float64.

OneFlow had them exchanged. Where they are, the error is as large as they are: it stands
beside what was measured.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from .accuracy_reference import RSTD_UNIT, half_ulp
from .layer_norm_layers import EPS, Answer, Batch, Layer

DTYPES = ("float32", "float64", "bfloat16")
DIMENSIONS = (1, 2, 3, 4)
# With weight, with bias.
AFFINE = ((True, True), (True, False), (False, True))
EXCHANGED = "exchanged"


class Row(NamedTuple):
    dtype: str
    shape: tuple[int, ...]  # of an example
    layer: str
    # Of the sum of |dy| (1 + 4.3 |xhat|), as each xhat has an rstd of its own: see
    # accuracy_reference. NaN where there is no weight.
    dweight: float
    dbias: float  # of the sum of |dy|
    dx: float  # of max |dy weight| / std, beyond half an ulp of bfloat16


def batches(dtype: str, dimensions: Iterable[int]) -> Iterable[Batch]:
    for rank, (with_weight, with_bias) in itertools.product(dimensions, AFFINE):
        random = np.random.RandomState([rank, with_weight, with_bias])
        shape = tuple(random.randint(2, 13 if rank < 3 else 7, rank))
        examples = random.randint(2, 9)
        mean, std = random.uniform(-30, 30), 10 ** random.uniform(-1, 1)
        x = mean + std * random.standard_normal((examples, *shape))
        dy = random.standard_normal(x.shape)
        wide = np.float64 if dtype == "float64" else np.float32
        weight, bias = random.uniform(0.5, 1.5, shape), random.uniform(-1, 1, shape)
        narrow = jnp.dtype(dtype)
        yield Batch(
            x.astype(narrow),
            dy.astype(narrow),
            weight.astype(wide) if with_weight else None,
            bias.astype(wide) if with_bias else None,
        )


def exact(batch: Batch) -> tuple[Answer, NDArray]:
    """In extended precision, and xhat."""
    x, dy = (a.astype(np.longdouble).reshape(len(a), -1) for a in (batch.x, batch.dy))
    weight = 1 if batch.weight is None else batch.weight.astype(np.longdouble).ravel()
    bias = 0 if batch.bias is None else batch.bias.astype(np.longdouble).ravel()
    deviation = x - x.mean(1, keepdims=True)
    rstd = 1 / np.sqrt((deviation**2).mean(1, keepdims=True) + np.longdouble(EPS))
    xhat, g = deviation * rstd, dy * weight
    dx = rstd * (g - g.mean(1, keepdims=True) - xhat * (g * xhat).mean(1, keepdims=True))
    shape = batch.x.shape
    return Answer(
        (xhat * weight + bias).reshape(shape),
        dx.reshape(shape),
        (dy * xhat).sum(0).reshape(shape[1:]),
        dy.sum(0).reshape(shape[1:]),
    ), xhat.reshape(shape)


def measure(
    layers: Iterable[Layer],
    dimensions: Iterable[int] = DIMENSIONS,
    after: Callable[[], object] = lambda: None,
) -> list[Row]:
    rows = []
    for dtype, given in ((d, b) for d in DTYPES for b in batches(d, tuple(dimensions))):
        right, xhat = exact(given)
        for layer in layers:
            rows.append(_row(dtype, given, right, xhat, layer.name, layer.answer(given)))
        exchanged = right._replace(
            dweight=None if given.weight is None else right.dbias,
            dbias=None if given.bias is None else right.dweight,
        )
        rows.append(_row(dtype, given, right, xhat, EXCHANGED, exchanged))
        after()
    return rows


def _row(
    dtype: str, given: Batch, right: Answer, xhat: NDArray, layer: str, gave: Answer
) -> Row:
    assert (gave.dweight is None) == (given.weight is None)
    assert (gave.dbias is None) == (given.bias is None)
    each = np.abs(given.dy.astype(np.longdouble))
    units = ((each * (1 + RSTD_UNIT * np.abs(xhat))).sum(0), each.sum(0))
    dweight, dbias = (
        np.nan if found is None else float(np.max(np.abs(found - correct) / unit))
        for found, correct, unit in zip(gave[2:], right[2:], units, strict=True)
    )
    weight = 1 if given.weight is None else given.weight
    axes = tuple(range(1, xhat.ndim))
    wide = given.x.astype(np.longdouble)
    unit = (each * weight).max(axes, keepdims=True) / wide.std(axes, keepdims=True)
    off = np.abs(gave.dx - right.dx)
    if dtype == "bfloat16":
        off = np.maximum(off - half_ulp(right.dx, given.x.dtype), 0)
    return Row(dtype, xhat.shape[1:], layer, dweight, dbias, float(np.max(off / unit)))
