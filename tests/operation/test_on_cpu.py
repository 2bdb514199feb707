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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_x_is_read_once(shape):
    x = normal(0, shape)
    program = str(jax.jit(on_cpu.statistics).lower(x).compile().as_text())
    entry = program[program.index("\nENTRY") :]
    (name,) = re.findall(r"(%\S+) = .* parameter\(0\)", entry)
    readers = [line for line in entry.splitlines() if f"{name}," in line or f"{name})" in line]
    assert len(readers) == 1, entry


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("outlier", [0, 1e4, -1e15])
@pytest.mark.parametrize("mean", [0, 1e6])
def test_what_float32_can_hold_is_exact(shape, outlier, mean):
    """The mean and its rest hold 48 bits; the squared deviations are rounded once."""
    x = np.array(normal(0, shape, mean, 1))
    x[0, :, 0] += outlier
    count, *moments = jit(on_cpu.statistics)(f32(x))
    computed, m2, rest = (np.asarray(v, np.float64) for v in moments)
    exactly = x.astype(np.float64).mean((0, 2))
    deviations = x.astype(np.float64) - exactly[:, None]
    np.testing.assert_array_equal(count, x.shape[0] * x.shape[2])
    np.testing.assert_allclose(computed + rest, exactly, rtol=2**-47, atol=1e-13)
    np.testing.assert_allclose(m2, (deviations**2).sum((0, 2)), rtol=2**-23)
