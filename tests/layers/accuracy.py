"""Checks one training step of a norm against extended precision, within bounds from arithmetic.

The bounds are a few roundings of the dtype of the computation (6e-8 each in float32), for any
mean and number of values. `tests.exact` defines their units.
"""

import functools
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np

from tests import exact
from tests.compiling import lowered_for
from tests.exact import EPS, Answer, Batch
from tests.layers.norms import NORMS, made, with_parameters

# dweight: x - mean - mean_rest is rounded twice, by half an ulp each, where mean/std is large.
BOUNDS = {"y": 1e-6, "variance": 5e-7, "dx": 1e-6, "dweight": 2.0**-23, "dbias": 2e-7}
MEAN_ULPS = 4

seeds = st.integers(0, 2**32 - 1)


def train(batch, mask=None, norm="BatchNorm", platform="cpu", frozen=False):
    """Returns the results of one training step of a norm, and the remembered mean.

    The step is lowered for `platform`, and runs on the platform of this machine. If `frozen`,
    weight and bias have no gradients.
    """
    return _compiled(norm, platform, frozen)(batch, mask)


@functools.cache
def _compiled(norm, platform, frozen):
    step = functools.partial(_step, norm=norm, frozen=frozen)
    return jax.jit(step) if platform == "cpu" else lowered_for(platform, step)


def _step(batch, mask, *, norm, frozen):
    layer, call = made(norm, batch.x.shape[1:], eps=EPS)

    def forward(x, *affine):
        return call(with_parameters(layer, *affine or (batch.weight, batch.bias)), x, mask)

    affine = () if frozen else (batch.weight, batch.bias)
    y, pull_back, state = jax.vjp(forward, batch.x, *affine, has_aux=True)
    dx, *gradients = pull_back(batch.dy)
    if state is None:
        mean = variance = None
    else:
        statistics = state.get(layer.memory_index).statistics
        mean, variance = statistics.mean, statistics.variance
    return Answer(y, variance, dx, *gradients or (None, None)), mean


@functools.partial(jax.jit, static_argnums=1)
def forward(batch, norm):
    """Returns y of a norm, without differentiation."""
    layer, call = made(norm, batch.x.shape[1:], eps=EPS)
    return call(with_parameters(layer, batch.weight, batch.bias), batch.x)[0]


def make_batch(random, x, *, norm="BatchNorm", affine=True):
    """Returns `x`, random dy, and random weight and bias, or ones and zeros."""
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    shape = made(norm, x.shape[1:])[0].weight.shape
    weight = random.uniform(0.5, 1.5, shape) if affine else np.ones(shape)
    bias = random.uniform(-1, 1, shape) if affine else np.zeros(shape)
    dy = random.standard_normal(x.shape).astype(x.dtype)
    return Batch(x, dy, weight.astype(dtype), bias.astype(dtype))


def check(batch, mask, norm, *options, scale=1.0):
    """Checks a norm against the bounds. `scale` is the ulp relative to that of float32;
    `options` are those of `train`."""
    answer, mean = jax.tree.map(np.asarray, train(batch, mask, norm, *options))
    assert answer.y.dtype == answer.dx.dtype == batch.x.dtype
    if mask is not None:
        masked = ~exact.counted(batch, mask)
        assert not answer.y[masked].any()
        assert not answer.dx[masked].any()
    expected = NORMS[norm].exact(batch, mask=mask)
    errors = exact.errors(batch, expected, answer)._asdict()
    bounds = BOUNDS
    if norm != "BatchNorm":  # XLA adds the examples' gradients, possibly one after the other
        bounds = {**BOUNDS, "dbias": max(BOUNDS["dbias"], (len(batch.x) - 1) * 2.0**-24)}
    over = {name: error for name, error in errors.items() if error > scale * bounds[name]}
    assert not over, over
    if answer.dweight is not None:
        assert answer.dweight.dtype == answer.dbias.dtype == batch.weight.dtype
    if mean is not None:
        check_mean(batch, mask, mean, expected.answer.variance)


def check_mean(batch, mask, mean, variance):
    axes = tuple(axis for axis in range(batch.x.ndim) if axis != 1)
    is_valid = np.broadcast_to(True if mask is None else mask[:, None], batch.x.shape)
    x = batch.x.astype(np.longdouble)
    expected = x.mean(axes, where=is_valid)
    # The rounding of a mean near 0 is on the scale of the standard deviation.
    largest = np.maximum(np.abs(expected), np.sqrt(variance))
    ulps = np.abs(mean - expected) / np.spacing(largest.astype(mean.dtype))
    assert np.max(ulps) <= MEAN_ULPS


def far_from_zero(random, shape, dtype: Any = np.float32):
    """Draws columns of different means and standard deviations; mean/std from 1 to 1e7."""
    columns = shape[1]
    std = 10 ** random.uniform(-1.5, 1.5, columns)
    ratio = 10 ** random.uniform(0, 7, columns) * random.choice([-1, 1], columns)
    ratio[0] = 1e7
    return (std * (ratio + random.standard_normal(shape))).astype(dtype)


def with_outlier(random, shape, place, dtype: Any = np.float32):
    """Draws columns whose value at `place` is 1e6."""
    x = random.standard_normal(shape)
    x[place] = 1e6
    return x.astype(dtype)
