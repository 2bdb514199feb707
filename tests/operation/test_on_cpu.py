"""Tests how the statistics of float32 are computed on a CPU: in one pass, in float64."""

import re

import jax
import numpy as np
import pytest

from eqx_norm._normalise import on_cpu
from tests.compiling import jit
from tests.helpers import f32, normal

# Whole lines, places of examples, rows, columns.
SHAPES = [(32, 4, 3136), (32, 8, 49), (1, 16, 1024), (512, 64, 1)]


def statistics(x):
    return [v[0, :, 0] for v in on_cpu.statistics(x, shape=(1, x.shape[1], 1))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_x_is_read_once(shape):
    """Counts the loops that read x; another one reads the first value of each channel."""
    program = str(jax.jit(statistics).lower(normal(0, shape)).compile().as_text())
    entry = program[program.index("\nENTRY") :]
    (x,) = re.findall(r"(%\S+) = .* parameter\(0\)", entry)
    readers = re.findall(rf"= (.*) fusion\(.*{re.escape(x)}[,)]", entry)
    first = f"f32[1,{shape[1]},1]"
    assert [reader for reader in readers if first not in reader] == readers[:1]
    assert "f64" in readers[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("outlier", [0, 1e4, -1e15])
@pytest.mark.parametrize("mean", [0, 1e6])
def test_what_float32_can_hold_is_exact(shape, outlier, mean):
    """The mean and its rest hold 48 bits; the squared deviations are rounded once.

    A number takes part in at most n/16 + 48 additions, as 16 or more are summed at first. Each
    rounds by 2^-53 of a sum of at most n (sqrt(n) + 1) standard deviations.
    """
    x = np.array(normal(0, shape, mean, 1))
    x[0, :, 0] += outlier
    count, *moments = jit(statistics)(f32(x))
    computed, m2, rest = (np.asarray(v, np.float64) for v in moments)
    exactly = x.astype(np.float64).mean((0, 2))
    squares = (x.astype(np.float64) - exactly[:, None]) ** 2
    n = shape[0] * shape[2]
    rounding = 2**-53 * (n / 16 + 48) * (n**0.5 + 1) * squares.mean((0, 2)).max() ** 0.5
    np.testing.assert_array_equal(count, n)
    np.testing.assert_allclose(computed + rest, exactly, rtol=2**-47, atol=rounding)
    np.testing.assert_allclose(m2, squares.sum((0, 2)), rtol=2**-23)
