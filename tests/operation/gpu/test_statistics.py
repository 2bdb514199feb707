"""Tests that each backend's kernel keeps to the bounds of the formulas, in the interpreter."""

import functools
import math
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise import reference
from eqx_norm._normalise.gpu import choice, tiling, triton
from tests.compiling import jit
from tests.helpers import bits, f32

from .backends import BACKENDS, check_statistics, normal, statistics

# Columns, full tiles, a prime of rows, few rows, images, ensembles, rows, one channel.
SHAPES = [(1, 37, 5), (1, 256, 64), (1, 397, 32), (1, 1021, 33), (1, 3, 32), (1, 1, 3)]
SHAPES += [(1, 77, 17), (6, 129, 5), (2, 129, 64)]
SHAPES += [(5, 1023, 1), (3, 1, 1), (9, 7, 1), (2, 2500, 1), (1, 5115, 1)]


def grid(cut, *shapes, dtype="float32", also=()):
    """Parametrises a test by a cut, by shapes, and by the backends that serve them."""
    rows = [
        pytest.param(name, *case, id=f"{name}-{case}")
        for case, (name, backend) in product([*product([cut], shapes), *also], BACKENDS.items())
        if backend.refuses(jax.ShapeDtypeStruct(case[1], dtype)) is None
    ]
    names = ("backend", "cut", "shape")
    return pytest.mark.parametrize(names, rows, indirect=["backend", "cut"])


LOOPS = [("loops", shape) for shape in ((1, 397, 32), (2, 2500, 1))]
# The last are more than one program can merge.
SLICES = [("slices", shape) for shape in ((1, 397, 32), (1, 77, 17), (1, 40001, 8))]


@grid("as it is", *SHAPES, also=[*LOOPS, *SLICES])
def test_statistics(backend, cut, shape):
    check_statistics(backend, normal(shape, mean=3.0))


@grid("slices", (1, 2100, 32))
def test_a_merge_of_merges(backend, cut, shape, monkeypatch):
    small = functools.partial(tiling.Tiling, lanes=64, across=8, unroll=1, chunks=1, warps=4)
    merge = lambda shape, least: small(*shape, slices=tiling.blocks(shape[1], 64))  # noqa: E731
    monkeypatch.setattr(tiling, "merging", merge)
    assert tiling.reading(shape, 4).slices > 64
    check_statistics(backend, normal(shape, mean=3.0))


FAR = [(1, 77, 17), (2, 1023, 1), (1, 301, 64)]


@pytest.mark.parametrize("mean", [1e3, 1e5, 1e7])
@grid("as it is", *FAR)
def test_far_from_0(backend, cut, shape, mean):
    check_statistics(backend, normal(shape, mean=mean))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@grid("as it is", *FAR, dtype="bfloat16")
def test_halves_that_cannot_hold_the_square(backend, cut, shape, dtype):
    check_statistics(backend, normal(shape, dtype, mean=300))


@pytest.mark.parametrize(("first", "rows"), [(1e3, 1), (1e5, 1), (-1e6, 1), (1e3, 48)])
# In the last, a lane that starts with an outlier sees 127 chunks more.
@grid("as it is", *FAR, (5, 1023, 1), (1, 5115, 1), also=[("loops", (1, 2**12, 32))])
def test_outliers_in_first_place(backend, cut, shape, first, rows):
    check_statistics(backend, normal(shape).at[:, :rows].set(first))


@grid("as it is", (1, 7, 32), (6, 7, 1), also=[*LOOPS, *SLICES[:2], ("slices", (6, 300, 1))])
def test_constants_are_exact(backend, cut, shape):
    """Tests the failure of https://github.com/BVLC/caffe/pull/3963."""
    constants = f32([1e-3, 0.1, 1.0, -3.3, 65504.0, 16777213.0])
    constants = jnp.resize(constants, (shape[0], 1, shape[2]))
    mean, m2, rest = statistics(backend, jnp.broadcast_to(constants, shape))
    assert bits(mean) == bits(constants)
    assert not np.any([rest, m2])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@grid("as it is", (1, 300, 32), also=SLICES[:1])
def test_what_is_not_finite_stays_in_its_channel(backend, cut, shape, bad):
    x, others = normal(shape), [0, *range(2, 32)]
    before, after = (np.stack(statistics(backend, x.at[:, 200, 1].set(v))) for v in (0, bad))
    assert bits(after[..., others]) == bits(before[..., others])
    assert not np.isfinite(after[..., 1]).any()


@grid("loops", (1, 397, 32))
def test_a_variance_beyond_all_numbers(backend, cut, shape):
    mean, m2, _ = statistics(backend, 1e20 * normal(shape))
    assert np.all(np.isfinite(mean) & np.isposinf(m2))


@pytest.mark.parametrize("shape", [(1, 1, 5, 1), (2, 1, 5, 1), (1, 3, 5, 1)])
def test_which_axes_are_summed(shape):
    x, kernel = normal((2, 3, 5, 7)), functools.partial(triton.statistics, interpret=True)
    count, mean, m2, _ = jit(lambda x: choice.statistics(kernel, x, shape=shape))(x)
    n, *expected, _ = jit(lambda x: reference.statistics(x, shape=shape))(x)
    assert np.array_equal(count, n)
    np.testing.assert_allclose([mean, m2], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tilings(itemsize):
    sizes = (1, 2, 7, 31, 100, 128, 1000, 2049, 16384, 16385, 50176, 10**6)
    for rows, channels in product(sizes, sizes):
        reading = tiling.reading((1, rows, channels), itemsize)
        for cut, most in (reading, 64), (tiling.merging((1, rows, channels), 1), 16):
            assert all(math.log2(size).is_integer() for size in (cut.lanes, cut.across))
            assert cut.slice * (cut.slices - 1) < rows <= cut.slice * cut.slices
            assert cut.across * (cut.blocks - 1) < channels <= cut.across * cut.blocks
            assert cut.warps in (1, 2, 4, 8, 16)
            # Of 255 registers, those that hold values of one array.
            assert cut.lanes * cut.across * cut.unroll / (32 * cut.warps) <= most
