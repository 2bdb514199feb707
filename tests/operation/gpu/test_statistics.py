"""Tests that the kernel keeps to the bounds of the formulas, in Pallas's interpreter."""

import functools
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise import reference
from eqx_norm._normalise.gpu import choice, kernel, lanes, tiling
from tests.compiling import jit
from tests.helpers import bits, f32, normal

# The same work cut up in other ways, so that few values get to all parts of a kernel: two
# programs do all of it, chunk after chunk; or each has one chunk, and there is much to merge.
CUTS = {
    "as it is": {},
    "loops": {"_PROGRAMS": 2, "_HELD": 8},
    "slices": {"_PROGRAMS": 2**20, "_HELD": 8, "_SLICE": 1},
}


@pytest.fixture
def cut(request, monkeypatch):
    for name, value in CUTS[request.param].items():
        monkeypatch.setattr(tiling, name, value)


@pytest.fixture(autouse=True)
def lanes_in_a_tree(monkeypatch):
    def by_tree(values):
        half = len(values) // 2
        return by_tree(values[:half] + values[half:]) if half else values[0]

    # GPUs add lanes in a tree; the interpreter would add one after the other.
    monkeypatch.setattr(lanes, "total", by_tree)


def statistics(x):
    # How the work is cut up is no argument: a new function is traced anew.
    return jit(functools.partial(kernel.statistics, interpret=True))(x)


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


# Columns: full tiles, a prime of rows, few rows, an ensemble; rows; one channel.
SHAPES = [(1, 37, 5), (1, 256, 64), (1, 397, 32), (1, 1021, 33), (1, 3, 32), (1, 1, 3)]
SHAPES += [(6, 129, 5), (2, 129, 64), (5, 1023, 1), (3, 1, 1), (9, 7, 1), (1, 5115, 1)]


def grid(cut, *shapes, also=()):
    """Parametrises a test by a cut and by shapes."""
    cases = [*product([cut], shapes), *also]
    return pytest.mark.parametrize(("cut", "shape"), cases, indirect=["cut"])


LOOPS, SLICES = ([(cut, (1, 397, 32)), (cut, (2, 2500, 1))] for cut in ("loops", "slices"))
FAR = [(1, 77, 17), (2, 1023, 1), (1, 301, 64)]


@grid("as it is", *SHAPES, also=[*LOOPS, *SLICES])
def test_statistics(cut, shape):
    check_statistics(normal(0, shape, 3.0))


@grid("slices", (1, 2100, 32))
def test_a_merge_of_merges(cut, shape, monkeypatch):
    small = functools.partial(tiling.Tiling, lanes=64, across=8, unroll=1, chunks=1, warps=4)
    merge = lambda shape: small(*shape, slices=tiling.blocks(shape[1], 64))  # noqa: E731
    monkeypatch.setattr(tiling, "merging", merge)
    assert tiling.reading(shape, 4).slices > 64
    check_statistics(normal(0, shape, 3.0))


# Halves cannot hold the square.
@pytest.mark.parametrize("mean", [1e3, 1e5, 1e7, jnp.bfloat16(300), jnp.float16(300)], ids=str)
@grid("as it is", *FAR)
def test_far_from_0(cut, shape, mean):
    dtype = getattr(mean, "dtype", "float32")
    check_statistics(normal(0, shape, float(mean)).astype(dtype))


@pytest.mark.parametrize(("first", "rows"), [(1e3, 1), (1e5, 1), (-1e6, 1), (1e3, 48)])
# In the last, a lane that starts with an outlier sees 127 chunks more.
@grid("as it is", *FAR, (5, 1023, 1), (1, 5115, 1), also=[("loops", (1, 2**13, 32))])
def test_outliers_in_first_place(cut, shape, first, rows):
    check_statistics(normal(0, shape).at[:, :rows].set(first))


@grid("as it is", (1, 7, 32), (6, 7, 1), also=[*LOOPS, *SLICES, ("slices", (6, 300, 1))])
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


@pytest.mark.parametrize("shape", [(1, 1, 5, 1), (2, 1, 5, 1), (1, 3, 5, 1)])
def test_which_axes_are_summed(shape):
    x, interpreted = (
        normal(0, (2, 3, 5, 7)),
        functools.partial(kernel.statistics, interpret=True),
    )
    *got, _ = jit(lambda x: choice.by_columns(interpreted, x, shape=shape))(x)
    *expected, _ = jit(lambda x: reference.statistics(x, shape=shape))(x)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tilings(itemsize):
    sizes = (1, 2, 7, 31, 100, 128, 1000, 2049, 16384, 16385, 50176, 10**6)
    for rows, channels in product(sizes, sizes):
        reading = tiling.reading((1, rows, channels), itemsize)
        for cut, most in (reading, 64), (tiling.merging((1, rows, channels)), 16):
            assert all(size.bit_count() == 1 for size in (cut.lanes, cut.across))
            assert cut.slice * (cut.slices - 1) < rows <= cut.slice * cut.slices
            assert cut.across * (cut.blocks - 1) < channels <= cut.across * cut.blocks
            assert cut.warps in (1, 2, 4, 8, 16)
            # Of 255 registers, those that hold values of one array.
            assert cut.lanes * cut.across * cut.unroll / (32 * cut.warps) <= most
