"""Tests that the kernel for columns keeps to the bounds of the formulas."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise import reference
from eqx_norm._normalise.kernels import columns, gpu_columns
from tests.helpers import bits, f32, normal

from .interpreted import take_the_cpu_for

# The same work cut up in other ways, so that few values get to all parts of a kernel: each
# program does all of its columns, step after step; or it has one step, and there is much to
# merge.
CUTS = {
    "as it is": {},
    "loops": {"_PROGRAMS": 1, "_HELD": 8},
    "slices": {"_PROGRAMS": 2**20, "_HELD": 1},
}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    take_the_cpu_for("cuda", monkeypatch)


@pytest.fixture
def cut(request, monkeypatch):
    for name, value in CUTS[request.param].items():
        monkeypatch.setattr(gpu_columns, name, value)


def statistics(x):
    # How the work is cut up is no argument: a new function is traced anew.
    return jax.jit(lambda x: gpu_columns.moments(x))(x)


def check_statistics(x):
    """Holds the moments of (ensemble, rows, channels) to their bounds, in float64."""
    mean, m2, rest = (np.asarray(v, np.float64) for v in statistics(x))
    x = np.asarray(x, np.float64)
    exact, variance = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    ulp, eps = 2.0**-23, 1e-5  # of float32, and the layer's
    # Of the 1e-6 by which y may be wrong, this is a fifth.
    assert np.all(np.abs(mean + rest - exact) <= 2e-7 * np.sqrt(variance + eps))
    assert np.all(np.abs(mean - exact) <= 4 * ulp * (np.abs(exact) + np.sqrt(variance)))
    assert np.all(np.abs(m2 / x.shape[1] - variance) <= 5e-7 * (variance + eps))


# Few channels, many, a prime of rows, few rows, one; an ensemble.
SHAPES = [(1, 37, 4), (1, 256, 64), (1, 397, 32), (1, 1021, 96), (1, 3, 32), (1, 1, 8)]
SHAPES += [(6, 129, 12), (2, 129, 64), (5, 1023, 2), (1, 300, 256), (3, 1, 6)]


def grid(cut, *shapes, also=()):
    """Parametrises a test by a cut and by shapes."""
    cases = [*product([cut], shapes), *also]
    return pytest.mark.parametrize(("cut", "shape"), cases, indirect=["cut"])


LOOPS, SLICES = ([(cut, (1, 397, 32)), (cut, (2, 2500, 4))] for cut in ("loops", "slices"))
FAR = [(1, 77, 16), (2, 1023, 4), (1, 301, 64)]


@grid("as it is", *SHAPES, also=[*LOOPS, *SLICES, ("slices", (1, 4099, 32))])
def test_statistics(cut, shape):
    check_statistics(normal(0, shape, 3.0))


# Halves cannot hold the square.
@pytest.mark.parametrize("mean", [1e3, 1e5, 1e7, jnp.bfloat16(300), jnp.float16(300)], ids=str)
@grid("as it is", *FAR)
def test_far_from_0(cut, shape, mean):
    dtype = getattr(mean, "dtype", "float32")
    check_statistics(normal(0, shape, float(mean)).astype(dtype))


@pytest.mark.parametrize(("first", "rows"), [(1e5, 1), (-1e6, 1), (1e3, 48)])
# In the last, a lane that starts with an outlier sees 127 steps more.
@grid("as it is", *FAR, (1, 5115, 4), also=[("loops", (1, 2**13, 32))])
def test_outliers_in_first_place(cut, shape, first, rows):
    check_statistics(normal(0, shape).at[:, :rows].set(first))


@grid("as it is", (1, 7, 32), (6, 7, 2), also=[*LOOPS, *SLICES, ("slices", (6, 300, 2))])
def test_constants_are_exact(cut, shape):
    """Tests the failure of https://github.com/BVLC/caffe/pull/3963."""
    constants = f32([1e-3, 0.1, 1.0, -3.3, 65504.0, 16777213.0])
    constants = jnp.resize(constants, (shape[0], 1, shape[2]))
    mean, m2, rest = statistics(jnp.broadcast_to(constants, shape))
    assert bits(mean) == bits(constants)
    assert not np.any([rest, m2])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@grid("loops", (1, 300, 32), also=SLICES[:1])
def test_what_is_not_finite_stays_in_its_channel(cut, shape, bad):
    x, others = normal(0, shape), [0, *range(2, 32)]
    # A variance beyond all numbers.
    assert np.all(np.isposinf(statistics(1e20 * x)[1]))
    before, after = (np.stack(statistics(x.at[:, 200, 1].set(v))) for v in (0, bad))
    assert bits(after[..., others]) == bits(before[..., others])
    assert not np.isfinite(after[..., 1]).any()


@pytest.mark.parametrize("shape", [(1, 1, 6, 1), (2, 1, 6, 1), (1, 3, 6, 1)])
def test_which_axes_are_summed(shape):
    x = normal(0, (2, 3, 6, 7))
    *got, _ = columns.by_columns(gpu_columns.moments, x, shape=shape)
    *expected, _ = reference.statistics(x, shape=shape)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
