"""Tests how the work of a kernel is cut up, and when a kernel is worth its launch."""

import itertools
import math

import jax
import pytest

from eqx_norm._normalise.gpu import tiling

SIZES = (1, 2, 7, 31, 100, 128, 1000, 2049, 16384, 16385, 50176, 10**6)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("inputs", [1, 2])
def test_tilings(itemsize, inputs):
    for n, size in itertools.product(SIZES, SIZES):
        for length, cut, most in (
            (n, tiling.columns(1, n, size, itemsize, inputs), 64),
            (size, tiling.rows(n, size, itemsize, inputs), 64),
            (n, tiling.merge(n, size), 16),
        ):
            assert all(math.log2(size).is_integer() for size in (cut.lanes, cut.across))
            assert cut.slice * (cut.slices - 1) < length <= cut.slice * cut.slices
            assert cut.warps in (1, 2, 4, 8, 16)
            # Of 255 registers, those that hold values of one array.
            assert cut.lanes * cut.across * cut.unroll / (32 * cut.warps) <= most


def test_what_is_worth_a_kernel():
    def worth(*shape, dtype="float32"):
        return tiling.worthwhile(jax.ShapeDtypeStruct(shape, dtype))

    assert worth(256, 64, 56 * 56, dtype="bfloat16")
    assert worth(8192, 256, 1)
    assert not worth(256, 64, 56 * 56)  # may lie channel after channel
    assert worth(8192, 1, 1, 768, dtype="bfloat16")
    assert not worth(32, 64, 8 * 8, dtype="bfloat16")
    assert not worth(31, 2**22, 1)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("held", "most"), [(1, 8192), (4, 6144), (6, 4096)])
def test_every_row_is_read_by_one_program(itemsize, held, most):
    assert tiling.holds_rows(most, held)
    assert not tiling.holds_rows(most + 1, held)
    for values in (1, 3, 64, 768, 1000, 4096, most):
        cut = tiling.whole_rows(values, itemsize, held)
        assert cut.slices == cut.chunks == 1
        assert cut.lanes * cut.unroll >= values > cut.lanes * (cut.unroll - 1)
        # What a thread keeps fits into its registers.
        assert cut.lanes * cut.unroll * cut.across // (cut.warps * 32) * held <= 64


def test_programs_are_repeated_within_bounds():
    assert (tiling.repeated(1), tiling.repeated(10**6)) == (8, 32)
