"""Tests the kernel of statistics: by Pallas's interpreter, and that it is lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise.gpu import tiling, triton
from tests.compiling import jit
from tests.helpers import make, normal, over_batch

SHAPES = [(1, 64, 8), (1, 5000, 24), (3, 1000, 64), (1, 70000, 5), (2, 1, 3)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics(shape, dtype):
    x = (normal(0, shape) * 2 + 50).astype(dtype)
    mean, m2, rest = jit(lambda x: triton.statistics(x, interpret=True))(x)
    values = np.asarray(x, np.float64)
    exact = values.mean(1, keepdims=True)
    np.testing.assert_allclose(np.float64(mean) + np.float64(rest), exact, rtol=2e-7)
    squares = ((values - exact) ** 2).sum(1, keepdims=True)
    np.testing.assert_allclose(m2, squares, rtol=2e-6, atol=1e-5)


def test_a_constant_and_a_far_mean():
    x = jnp.concatenate([jnp.full((1, 3000, 8), 0.3), 1e6 + normal(0, (1, 3000, 8))], -1)
    mean, m2, rest = jit(lambda x: triton.statistics(x, interpret=True))(x)
    assert np.all(np.asarray(m2)[..., :8] == 0)
    assert np.all(np.asarray(mean)[..., :8] == np.float32(0.3))
    exact = np.asarray(x, np.float64).mean(1, keepdims=True)
    np.testing.assert_allclose(np.float64(mean) + np.float64(rest), exact, rtol=2e-9)


def test_slices_are_no_more_than_can_be_merged_and_cover_all_rows():
    for shape in [*SHAPES, (1, 2**22, 64), (7, 12345, 96)]:
        for itemsize in (2, 4):
            tiles = tiling.reading(shape, itemsize)
            assert tiles.slices * tiles.slice >= shape[1] > (tiles.slices - 1) * tiles.slice


def trained(dtype=jnp.float32, **arguments):
    layer, state = make(64, "batch", approach="batch", implementation="pallas", **arguments)
    traced = jax.jit(lambda x: over_batch(layer)(x, state)[0]).trace
    return lambda shape: traced(jnp.ones(shape, dtype)).lower(lowering_platforms=("cuda",))


@pytest.mark.x32
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lowered_for_cuda(dtype):
    text = trained(dtype)((32, 64, 14, 14)).as_text()
    assert "eqx_norm_statistics" in text


@pytest.mark.x32
def test_what_it_cannot_serve_says_so():
    layer, state = make(64, "batch", approach="batch", implementation="pallas")
    with pytest.raises(ValueError, match="for CUDA devices, and this program is for cpu"):
        jax.jit(lambda x: over_batch(layer)(x, state)[0])(jnp.ones((4, 64)))
    with (
        pytest.raises(ValueError, match="x is float64, and the kernel takes"),
        jax.enable_x64(),
    ):
        trained(jnp.float64)((32, 64, 4))
