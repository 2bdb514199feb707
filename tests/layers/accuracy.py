"""Checks one training step of a layer against 64-bit sums, within bounds from the arithmetic.

The bounds are a few roundings of the dtype that is calculated in, whatever the mean and the
number of values: of float32, one is 6e-8.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import equinox as eqx
import hypothesis.strategies as st
import jax
import numpy as np

from eqx_norm import LayerNorm
from experiments.lab import exact
from experiments.lab.exact import EPS, Answer, Batch
from tests.helpers import make

BOUNDS = {"y": 1e-6, "variance": 5e-7, "dx": 1e-6, "dweight": 1e-7, "dbias": 2e-7}
MEAN_ULPS = 4
# dweight = rstd * sum(dy (x - mean)). By the bound of the variance alone, rstd may be off by
# half of that; its root, its division and the product are three more roundings.
DWEIGHT_OF_ITSELF = BOUNDS["variance"] / 2 + 3 * 2**-24
FEW = 121

seeds = st.integers(0, 2**32 - 1)


@functools.partial(jax.jit, static_argnums=5)
def train(weight, bias, x, dy, mask, implementation="auto"):
    """Returns output, remembered mean and variance, and the gradients of one training step."""
    layer, state = make(
        x.shape[1], "batch", eps=EPS, approach="batch", implementation=implementation
    )

    def forward(weight, bias, x):
        affine = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))

        def one(x, mask):
            return affine(x, state, mask=mask)

        y, after = jax.vmap(one, axis_name="batch", out_axes=(0, None))(x, mask)
        return y, after.get(layer.memory_index)

    y, pull_back, memory = jax.vjp(forward, weight, bias, x, has_aux=True)
    return y, memory.mean, memory.variance, *pull_back(dy)


@jax.jit
def train_rows(weight, bias, x, dy):
    """Returns output and gradients of `LayerNorm` on `[examples, values]`."""

    def forward(weight, bias, x):
        layer = LayerNorm(x.shape[1], eps=EPS)
        return jax.vmap(eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias)))(x)

    y, pull_back = jax.vjp(forward, weight, bias, x)
    return y, *pull_back(dy)


def make_batch(random, x, *, affine=True, sum_of_y=False):
    """Returns `x` with weight, bias and the gradient of y drawn, or of `y.sum()` and ones."""
    dy = np.ones(x.shape) if sum_of_y else random.standard_normal(x.shape)
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    channels = x.shape[1]
    weight = random.uniform(0.5, 1.5, channels) if affine else np.ones(channels)
    bias = random.uniform(-1, 1, channels) if affine else np.zeros(channels)
    return Batch(x, dy.astype(x.dtype), weight.astype(dtype), bias.astype(dtype))


def check(batch, mask=None, scale=1.0, implementation="auto"):
    """Holds every quantity to its bound; `scale` is the ulp's, relative to float32."""
    y, mean, variance, dweight, dbias, dx = map(
        np.asarray, train(batch.weight, batch.bias, batch.x, batch.dy, mask, implementation)
    )
    counts = np.ones(y.shape[:1] + y.shape[2:], bool) if mask is None else mask

    def counted(values):
        """Returns what counts as `[n, C]`, in the same order."""
        return np.moveaxis(values, 1, -1)[counts]

    for values in (y, dx):
        assert values.dtype == batch.x.dtype
        assert not np.moveaxis(values, 1, -1)[~counts].any()
    flat = batch._replace(x=counted(batch.x), dy=counted(batch.dy))
    # All but the mean are the same for shifted values, and those 64 bits hold exactly.
    first = flat.x[:1].astype(np.longdouble)
    shifted = flat.x.astype(np.longdouble) - first
    right = exact.batch_norm(flat._replace(x=shifted))
    answer = Answer(counted(y), variance, counted(dx), dweight, dbias)
    found = exact.errors(flat, right, answer)._asdict()
    assert found.pop("nonfinite") == 0
    if len(flat.x) <= FEW:
        # With few values dweight is as large as sum |dy|, and rstd, a rounded root, is off by
        # more than 1e-7 of itself: so by what the rounding of rstd costs, and no more.
        sum_dy = np.abs(flat.dy.astype(np.longdouble)).sum(0)
        own = np.abs(right.answer.dweight) * DWEIGHT_OF_ITSELF * scale
        off = np.abs(dweight - right.answer.dweight) - own
        found["dweight"] = np.max(off / sum_dy)
    over = {name: error for name, error in found.items() if error > scale * BOUNDS[name]}
    assert not over, over
    # A mean near 0 is what is left of sums of numbers as large as the standard deviation.
    largest = np.maximum(np.abs(first[0] + shifted.mean(0)), np.sqrt(right.answer.variance))
    ulps = np.abs(mean - (first[0] + shifted.mean(0))) / np.spacing(largest.astype(mean.dtype))
    assert np.max(ulps) <= MEAN_ULPS


def check_rows(batch, scale=1.0):
    """Holds `LayerNorm` to the bounds of `BatchNorm`: an example is a channel of the other."""
    weight, bias, x, dy = batch.weight, batch.bias, batch.x, batch.dy
    y, dweight, dbias, dx = map(np.asarray, train_rows(weight, bias, x, dy))
    assert y.dtype == dx.dtype == x.dtype
    assert dweight.dtype == weight.dtype

    # Of values shifted by the first, which changes nothing, and which 64 bits hold exactly.
    shifted = x.astype(np.longdouble) - x[:, :1].astype(np.longdouble)
    right = exact.layer_norm(batch._replace(x=shifted))
    found = exact.errors(batch, right, Answer(y, None, dx, None, dbias))
    for quantity in ("y", "dx", "dbias"):
        assert getattr(found, quantity) <= scale * BOUNDS[quantity], quantity

    # Each example has an rstd of its own, which is off by as much of itself as BatchNorm's.
    each = np.abs(dy.astype(np.longdouble))
    unit = BOUNDS["dweight"] * each + DWEIGHT_OF_ITSELF * each * np.abs(right.xhat)
    off = np.abs(dweight - right.answer.dweight)
    assert np.max(off / unit.sum(0)) <= scale


def by_channel(values, ndim):
    return np.reshape(values, (1, -1) + (1,) * (ndim - 2))


def far_from_zero(random, shape, dtype: Any = np.float32):
    """Draws each channel with another mean and standard deviation; mean/std from 1 to 1e7."""
    channels = shape[1]
    std = 10 ** random.uniform(-1.5, 1.5, channels)
    ratio = 10 ** random.uniform(0, 7, channels) * random.choice([-1, 1], channels)
    ratio[0] = 1e7
    std, ratio = (by_channel(values, len(shape)) for values in (std, ratio))
    return (std * (ratio + random.standard_normal(shape))).astype(dtype)


def with_outlier(random, shape, place, dtype: Any = np.float32):
    """Draws channels in each of which one value is 1e6."""
    x = random.standard_normal(shape)
    place = np.unravel_index(place, shape[:1] + shape[2:])
    x[(place[0], slice(None), *place[1:])] = 1e6
    return x.astype(dtype)


class Case(NamedTuple):
    """Names a layer and the shape of a batch: `[N, C, *spatial]`, or `[examples, values]`."""

    layer: Literal["BatchNorm", "LayerNorm"]
    shape: tuple[int, ...]

    def __str__(self):
        return f"{self.layer} {'x'.join(map(str, self.shape))}"

    @property
    def axis(self):
        """Returns the axis of what is normalised by its own moments, channels or examples."""
        return 1 if self.layer == "BatchNorm" else 0

    @property
    def values(self):
        """Returns how many values are normalised together."""
        return math.prod(self.shape) // self.shape[self.axis]

    def draw(self, random, of_channels, *args):
        """Returns what `of_channels` draws for a shape with channels, in this case's shape."""
        if self.layer == "BatchNorm":
            return of_channels(random, self.shape, *args)
        return np.ascontiguousarray(of_channels(random, self.shape[::-1], *args).T)

    def check(self, batch, scale=1.0):
        (check if self.layer == "BatchNorm" else check_rows)(batch, scale=scale)
