"""Checks one training step of a layer against 64-bit sums, within bounds from the arithmetic.

The bounds are a few roundings of the dtype that is calculated in, whatever the mean and the
number of values: of float32, one is 6e-8. `experiments.common.exact` has their units.
"""

import functools
from typing import Any

import equinox as eqx
import hypothesis.strategies as st
import jax
import numpy as np

from eqx_norm import LayerNorm
from tests import exact
from tests.compiling import lowered_for
from tests.exact import EPS, Answer, Batch
from tests.helpers import make

# dweight: x - mean - mean_rest is rounded twice, by half an ulp each, where mean/std is large.
BOUNDS = {"y": 1e-6, "variance": 5e-7, "dx": 1e-6, "dweight": 2.0**-23, "dbias": 2e-7}
MEAN_ULPS = 4

seeds = st.integers(0, 2**32 - 1)


def train(batch, mask=None, *, layer="BatchNorm", implementation="auto", platform="cpu"):
    """Returns what a layer gives in one training step, and the mean that it remembers; `train`
    is lowered for the platform, and runs on this one.

    A `LayerNorm`, which remembers nothing, is given `[examples, values]`.
    """
    return _compiled(layer, implementation, platform)(batch, mask)


@functools.cache
def _compiled(layer, implementation, platform):
    step = functools.partial(_step, layer=layer, implementation=implementation)
    return jax.jit(step) if platform == "cpu" else lowered_for(platform, step)


def _step(batch, mask, *, layer, implementation):
    channels = batch.x.shape[1]

    def layer_norm(weight, bias, x):
        how: Any = {"eps": EPS, "implementation": implementation}
        model = LayerNorm(channels, **how)
        model = eqx.tree_at(lambda m: (m.weight, m.bias), model, (weight, bias))
        return jax.vmap(model)(x), (None, None)

    def batch_norm(weight, bias, x):
        how: Any = {"eps": EPS, "approach": "batch", "implementation": implementation}
        model, state = make(channels, "batch", **how)
        model = eqx.tree_at(lambda m: (m.weight, m.bias), model, (weight, bias))

        def one(x, mask):
            return model(x, state, mask=mask)

        y, after = jax.vmap(one, axis_name="batch", out_axes=(0, None))(x, mask)
        memory = after.get(model.memory_index).statistics
        return y, (memory.mean, memory.variance)

    forward = batch_norm if layer == "BatchNorm" else layer_norm
    operands = batch.weight, batch.bias, batch.x
    y, pull_back, (mean, variance) = jax.vjp(forward, *operands, has_aux=True)
    dweight, dbias, dx = pull_back(batch.dy)
    return Answer(y, variance, dx, dweight, dbias), mean


def make_batch(random, x, *, affine=True):
    """Returns `x` with the gradient of y drawn; and weight and bias, or ones and zeros."""
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    channels = x.shape[1]
    weight = random.uniform(0.5, 1.5, channels) if affine else np.ones(channels)
    bias = random.uniform(-1, 1, channels) if affine else np.zeros(channels)
    dy = random.standard_normal(x.shape).astype(x.dtype)
    return Batch(x, dy, weight.astype(dtype), bias.astype(dtype))


def check(batch, mask=None, *, layer="BatchNorm", scale=1.0, **how):
    """Holds a layer to the bounds; `scale` is the ulp's, relative to float32; `how`: as for
    `train`."""
    found = train(batch, mask, layer=layer, **how)
    answer, mean = jax.tree.map(np.asarray, found)
    assert answer.y.dtype == answer.dx.dtype == batch.x.dtype
    assert answer.dweight.dtype == answer.dbias.dtype == batch.weight.dtype
    definition, axis = exact.layer_norm, 1
    if layer == "BatchNorm":
        definition, axis = exact.batch_norm, 0
        counts = np.full(batch.x.shape[:1] + batch.x.shape[2:], True) if mask is None else mask
        x, dy, y, dx = (np.moveaxis(a, 1, -1) for a in (batch.x, batch.dy, answer.y, answer.dx))
        assert not y[~counts].any()
        assert not dx[~counts].any()
        # Of what counts, as `[n, C]`.
        batch = batch._replace(x=x[counts], dy=dy[counts])
        answer = answer._replace(y=y[counts], dx=dx[counts])
    # The answer to shifted values is the same, and 64 bits hold those exactly.
    x = batch.x.astype(np.longdouble)
    first = x.take([0], axis)
    right = definition(batch._replace(x=x - first))
    errors = exact.errors(batch, right, answer)._asdict()
    bounds = BOUNDS
    if layer == "LayerNorm":  # XLA adds the examples' gradients, possibly one after the other
        bounds = {**BOUNDS, "dbias": max(BOUNDS["dbias"], (len(batch.x) - 1) * 2.0**-24)}
    over = {name: error for name, error in errors.items() if error > scale * bounds[name]}
    assert not over, over
    if layer == "BatchNorm":
        right_mean = first[0] + (x - first).mean(0)
        # A mean near 0 is what is left of sums of numbers as large as the standard deviation.
        largest = np.maximum(np.abs(right_mean), np.sqrt(right.answer.variance))
        ulps = np.abs(mean - right_mean) / np.spacing(largest.astype(mean.dtype))
        assert np.max(ulps) <= MEAN_ULPS


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
