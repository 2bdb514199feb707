"""Tests the kernels for GPUs in Mosaic GPU's interpreter, which knows the layouts of arrays."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as _mosaic_gpu

from eqx_norm._normalise.formulas.activation import elementwise
from eqx_norm._normalise.formulas.row_norm import RowNorm
from eqx_norm._normalise.kernels import gpu_columns, gpu_rows
from experiments.common.exact import standardised
from tests.helpers import normal, y_and_gradients

from .test_columns import check

mosaic_gpu: Any = _mosaic_gpu  # the oldest jax lacks parts of this module
pytestmark = pytest.mark.skipif(
    not hasattr(mosaic_gpu, "force_gpu_interpret_mode"), reason="make test-newest: jax 0.12"
)


def interpreted(function, *arrays, finds_races):
    how = mosaic_gpu.InterpretGPUParams(detect_races=finds_races)
    with mosaic_gpu.force_gpu_interpret_mode(how):
        return jax.jit(function)(*arrays)


# Shapes of x, (examples, groups, length), and of weights. In the last two cases, blocks overlap
# and write the same values, which the race detector reports.
ROWS = [
    ((8, 1, 768), (1, 768), jax.nn.silu, True),
    ((4, 8, 64), (8, 1), None, True),
    ((32, 32, 8), (32, 8), jax.nn.gelu, True),
    ((9, 1, 768), (1, 768), None, False),
    ((300, 1, 8), (1, 8), jax.nn.relu, False),
]


@pytest.mark.parametrize(("shape", "affine", "activation", "finds_races"), ROWS)
def test_row_kernels_in_the_mosaic_interpreter(shape, affine, activation, finds_races):
    random = np.random.default_rng(0)
    x, dy = random.standard_normal((2, *shape)).astype(np.float32)
    weight, bias = random.standard_normal((2, 1, *affine)).astype(np.float32)
    function = None if activation is None else elementwise(activation, shape[-1:], x.dtype)
    norm = RowNorm(1e-5, centred=True, activation=function)
    run = functools.partial(interpreted, finds_races=finds_races)
    y = run(functools.partial(gpu_rows.forward, norm=norm), x, weight, bias)
    gradients = functools.partial(gpu_rows.backward, norm=norm, shape=(1, *affine))
    found = *y, *run(gradients, dy, x, weight, bias)
    with jax.enable_x64(True):
        x, dy, weight, bias = (v.astype(np.float64) for v in (x, dy, weight, bias))

        def formula(weight, bias, x):
            y = standardised(x, -1)[0] * weight + bias
            return y if activation is None else activation(y)

        y, dweight, dbias, dx = y_and_gradients(formula, dy, weight, bias, x)
        expected = [np.asarray(v) for v in (y, dx, dweight, dbias)]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@pytest.mark.parametrize("shape", [(1, 768, 32), (2, 5, 6), (1, 700, 33)])
def test_column_kernel_in_the_mosaic_interpreter(shape):
    finds_races = shape[1] == 768
    statistics = functools.partial(interpreted, gpu_columns.moments, finds_races=finds_races)
    check(statistics, normal(0, shape, 1e3))
