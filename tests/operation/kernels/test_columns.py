"""Tests that the statistics of the column kernel lie within the bounds of the formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise.kernels import columns, gpu_columns
from tests.helpers import bits, f32, normal

from .interpreted import take_the_cpu_for

# Kernels are interpreted: what XLA:CPU makes of that is not what a GPU or TPU runs.
UNOPTIMISED = True

# Ways to split the work, by which few values reach all parts of a kernel. With "loops", each
# program loops over all rows of its columns; with "slices", each program has one step, and many
# slices are merged.
CUTS = {
    "default": {},
    "loops": {"_PROGRAMS": 1, "_HELD": 8},
    "slices": {"_PROGRAMS": 2**20, "_HELD": 1},
}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    take_the_cpu_for("cuda", monkeypatch)


@pytest.fixture
def statistics(request, monkeypatch):
    """Splits the work, and returns a function that is traced anew with this split."""
    for name, value in CUTS[request.param].items():
        monkeypatch.setattr(gpu_columns, name, value)
    return jax.jit(lambda x: gpu_columns.moments(x))


def check(statistics, x):
    """Checks the moments of x, (ensemble, rows, channels), against bounds in float64."""
    mean, m2, rest = (np.asarray(v, np.float64) for v in statistics(x))
    x = np.asarray(x, np.float64)
    exact, variance = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    ulp, eps = 2.0**-23, 1e-5  # of float32, and the layer's
    # This bound is a fifth of the error of 1e-6 that y may have.
    assert np.all(np.abs(mean + rest - exact) <= 2e-7 * np.sqrt(variance + eps))
    assert np.all(np.abs(mean - exact) <= 4 * ulp * (np.abs(exact) + np.sqrt(variance)))
    assert np.all(np.abs(m2 / x.shape[1] - variance) <= 5e-7 * (variance + eps))


def each(*cases):
    """Parametrises a test by ways to split the work and by shapes."""
    return pytest.mark.parametrize(("statistics", "shape"), cases, indirect=["statistics"])


# Fewer rows than a tile; several tiles of few or all columns, with rows left or without, in an
# ensemble; more slices than the second kernel merges at once.
@each(
    ("default", (3, 37, 6)),
    ("default", (2, 1023, 4)),
    ("default", (1, 256, 64)),
    ("default", (1, 1021, 96)),
    ("loops", (1, 300, 32)),
    ("slices", (1, 4099, 32)),
)
def test_column_statistics(statistics, shape):
    check(statistics, normal(0, shape, 3.0))


# Half precision cannot represent the square of 300.
@pytest.mark.long
@pytest.mark.parametrize("mean", [1e5, 1e7, jnp.bfloat16(300), jnp.float16(300)], ids=str)
@each(("default", (2, 1023, 4)), ("default", (1, 301, 64)))
def test_column_statistics_of_means_far_from_0(statistics, shape, mean):
    dtype = getattr(mean, "dtype", "float32")
    check(statistics, normal(0, shape, float(mean)).astype(dtype))


@pytest.mark.long
@pytest.mark.parametrize(("first", "rows"), [(1e5, 1), (-1e6, 1), (1e3, 48)])
# In the last case, a lane that starts with an outlier has 127 more steps.
@each(("default", (1, 301, 64)), ("default", (1, 5115, 4)), ("loops", (1, 2**13, 32)))
def test_column_statistics_of_outliers_in_the_first_rows(statistics, shape, first, rows):
    check(statistics, normal(0, shape).at[:, :rows].set(first))


@each(("loops", (1, 397, 32)), ("slices", (6, 300, 2)))
def test_column_statistics_of_constants_are_exact(statistics, shape):
    """Tests the failure reported in https://github.com/BVLC/caffe/pull/3963."""
    constants = f32([1e-3, 0.1, 1.0, -3.3, 65504.0, 16777213.0])
    constants = jnp.resize(constants, (shape[0], 1, shape[2]))
    mean, m2, rest = statistics(jnp.broadcast_to(constants, shape))
    assert bits(mean) == bits(constants)
    assert not np.any([rest, m2])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@each(("slices", (1, 397, 32)))
def test_non_finite_values_stay_in_their_channel(statistics, shape, bad):
    x, others = normal(0, shape), [0, *range(2, 32)]
    # The variance overflows to infinity.
    assert np.all(np.isposinf(statistics(1e20 * x)[1]))
    before, after = (np.stack(statistics(x.at[:, 200, 1].set(v))) for v in (0, bad))
    assert bits(after[..., others]) == bits(before[..., others])
    assert not np.isfinite(after[..., 1]).any()


@pytest.mark.parametrize("shape", [(1, 1, 6, 1), (2, 1, 6, 1), (1, 3, 6, 1)])
def test_column_statistics_are_summed_over_axes_of_size_1(shape):
    def moments(x, axes=(1,)):
        x = np.asarray(x)
        mean = x.mean(axes, keepdims=True)
        return [jnp.asarray(v) for v in (mean, ((x - mean) ** 2).sum(axes, keepdims=True))]

    x = normal(0, (2, 3, 6, 7))
    count, *got = columns.computed(moments, x, shape=shape)
    summed = tuple(axis for axis, size in enumerate(shape) if size == 1)
    expected = moments(x, summed)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    assert (count == x.size // expected[0].size).all()
