"""Checks one training step of a norm against extended precision, within bounds from arithmetic.

The bounds are a few roundings of the dtype of the computation (6e-8 each in float32), for any
mean and number of values. `experiments.common.exact` defines their units.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.common import exact
from experiments.common.exact import EPS, Answer, Batch
from tests.compiling import lowered_for
from tests.helpers import y_and_gradients
from tests.layers.norms import NORMS, made, mask_shape, with_parameters

# dweight: x - mean - mean_lo is rounded twice, by half an ulp each, where mean/std is large.
BOUNDS = {"y": 1e-6, "variance": 5e-7, "dx": 1e-6, "dweight": 2.0**-23, "dbias": 2e-7}
MEAN_ULPS = 4


class Case(NamedTuple):
    """Holds a norm, the shape of a batch, the platform that its step is lowered for, to run on
    that of this machine, and whether its weights are frozen and so have no gradients."""

    norm: str
    shape: tuple[int, ...]
    platform: str = "cpu"
    frozen: bool = False  # on a GPU, y and dx are then one kernel each

    def __str__(self):
        words = self.norm, "x".join(map(str, self.shape)), self.platform, "frozen" * self.frozen
        return " ".join(word for word in words if word not in ("cpu", ""))

    @property
    def axis(self):
        """Returns the axis along which moments differ: of channels, or of examples."""
        return 1 if self.norm == "BatchNorm" else 0

    def batch(self, random, draw, *args, affine=True):
        """Returns a batch: x, of which `draw` returns a column for each channel or example,
        random dy, and random weight and bias, or ones and zeros."""
        sizes = list(self.shape)
        columns = sizes.pop(self.axis)
        x = draw(random, (int(np.prod(sizes)), columns), *args).reshape(*sizes, columns)
        x = np.ascontiguousarray(np.moveaxis(x, -1, self.axis))
        dtype = np.float64 if x.dtype == np.float64 else np.float32
        shape = made(self.norm, x.shape[1:])[0].weight.shape
        weight = random.uniform(0.5, 1.5, shape) if affine else np.ones(shape)
        bias = random.uniform(-1, 1, shape) if affine else np.zeros(shape)
        dy = random.standard_normal(x.shape).astype(x.dtype)
        return Batch(x, dy, weight.astype(dtype), bias.astype(dtype))

    def mask(self):
        """Returns a mask that excludes every third position (or value) from the first on, and
        the second example."""
        shape = mask_shape(self.norm, self.shape)
        mask = np.arange(np.prod(shape)).reshape(shape) % 3 != 0
        mask[1] = False
        return mask

    def train(self, batch, mask=None):
        """Returns the results of one training step, and the remembered mean."""
        return _step(self.norm, self.platform, self.frozen)(batch, mask)

    def check(self, batch, mask=None, scale=1.0):
        """Checks the norm against the bounds. `scale` is the ulp relative to float32's, or the
        factor that cancellation costs in the variance; it costs the mean the root of that."""
        answer, mean = jax.tree.map(np.asarray, self.train(batch, mask))
        assert answer.y.dtype == answer.dx.dtype == batch.x.dtype
        counted = exact.counted(batch, mask)
        assert not answer.y[~counted].any()
        assert not answer.dx[~counted].any()
        expected = NORMS[self.norm].exact(batch, mask=mask)
        errors = exact.errors(batch, expected, answer)._asdict()
        bounds = dict(BOUNDS)
        if mean is None:  # XLA adds the examples' gradients, possibly one after the other
            bounds["dbias"] = max(BOUNDS["dbias"], (len(batch.x) - 1) * 2.0**-24)
        over = {name: error for name, error in errors.items() if error > scale * bounds[name]}
        assert not over, over
        if answer.dweight is not None:
            assert answer.dweight.dtype == answer.dbias.dtype == batch.weight.dtype
        if mean is not None:
            axes = tuple(axis for axis in range(batch.x.ndim) if axis != 1)
            expected_mean = batch.x.astype(np.longdouble).mean(axes, where=counted)
            # The rounding of a mean near 0 is on the scale of the standard deviation.
            largest = np.maximum(np.abs(expected_mean), np.sqrt(expected.answer.variance))
            ulps = np.abs(mean - expected_mean) / np.spacing(largest.astype(mean.dtype))
            assert np.max(ulps) <= MEAN_ULPS * max(1, scale**0.5)


def cases(norm, *shapes, **options):
    return [Case(norm, shape, **options) for shape in shapes]


@functools.cache
def _step(norm, platform, frozen):
    def step(batch, mask):
        layer, call = made(norm, batch.x.shape[1:], eps=EPS)

        def forward(x, *affine):
            return call(with_parameters(layer, *affine or (batch.weight, batch.bias)), x, mask)

        affine = () if frozen else (batch.weight, batch.bias)
        results = y_and_gradients(forward, batch.dy, batch.x, *affine, has_aux=True)
        y, state, dx, *gradients = results
        mean = variance = None
        if state is not None:
            statistics = state.get(layer.memory_index).statistics
            mean, variance = statistics.mean, statistics.variance
        return Answer(y, variance, dx, *gradients or (None, None)), mean

    return jax.jit(step) if platform == "cpu" else lowered_for(platform, step)


def far_from_zero(random, shape, dtype: Any = np.float32):
    """Draws columns of different means and standard deviations; mean/std from 1 to 1e7."""
    columns = shape[1]
    std = 10 ** random.uniform(-1.5, 1.5, columns)
    ratio = 10 ** random.uniform(0, 7, columns) * random.choice([-1, 1], columns)
    ratio[0] = 1e7
    return (std * (ratio + random.standard_normal(shape))).astype(dtype)


def with_outlier(random, shape, place, dtype: Any = np.float32):
    """Draws columns whose value at `place`, or each there, is 1e6."""
    x = random.standard_normal(shape)
    x[place] = 1e6
    return x.astype(dtype)
