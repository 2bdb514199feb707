"""Tests that the kernels of both backends are lowered for GPUs that are not there.

What passes Pallas's interpreter may fail in Triton or Mosaic: that it does not is tested here
as far as it can be without CUDA's compiler. The rest: experiments/compiled.
"""

import jax
import pytest

from eqx_norm._normalise.gpu import tiling
from eqx_norm._normalise.gpu.mosaic import BACKEND as MOSAIC
from eqx_norm._normalise.gpu.triton import BACKEND as TRITON

from .backends import ACTIVATIONS, lowered, lowered_sums, operands
from .gpus import CORES, mesh, needs_mosaic

by_mosaic = pytest.param(MOSAIC, id="mosaic", marks=needs_mosaic)
each_backend = pytest.mark.parametrize(
    "backend", [pytest.param(TRITON, id="triton"), by_mosaic]
)
# In columns with and without a remainder, in one chunk or many; in rows that are held or not.
SHAPES = [
    (65536, 256, 1),
    (1021, 33, 1),
    (32, 64, 56, 56),
    (7, 3, 11),
    (8192, 1, 1, 768),
    (3, 1, 1, 7),
    (5, 1, 1, 16384),
    (3, 1, 1, 100003),
    (32, 3, 50176),
]


@pytest.mark.parametrize("kind", CORES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(65536, 256, 1), (8192, 1, 1, 768), (4, 1021, 64, 3)])
@each_backend
def test_on_each_gpu(backend, kind, dtype, shape):
    if backend is MOSAIC and (shape[-2] == 1 or "A100" in kind):
        pytest.skip("Mosaic's kernels are for columns, from an H100 on")
    x, vector, _ = operands(shape, dtype)
    kernels = 1 if shape[-2] == 1 else 2
    assert backend.serves(x, None, jax.nn.relu) is None
    assert lowered(backend.statistics, x, on=mesh(kind)) == kernels
    assert lowered_sums(backend, jax.nn.relu, x, vector, on=mesh(kind)) == kernels


@pytest.mark.parametrize(
    ("backend", "shape", "masked"),
    [
        *((TRITON, shape, masked) for shape in SHAPES for masked in (False, True)),
        pytest.param(MOSAIC, (4097, 64, 1), False, marks=needs_mosaic),
    ],
)
def test_every_shape_with_64_bits_and_strict_dtypes(backend, shape, masked):
    x, vector, mask = operands(shape, "bfloat16", masked=masked)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert lowered(backend.statistics, x, *mask) in (1, 2)
        assert lowered_sums(backend, jax.nn.silu, x, vector, mask) in (1, 2)


@each_backend
def test_a_merge_of_merges(backend, monkeypatch):
    monkeypatch.setattr(tiling, "_CHUNKS", 1)
    x, vector, _ = operands((2**20, 32, 1), "float32")
    assert lowered(backend.statistics, x) == 3
    assert lowered_sums(backend, None, x, vector) == 3


@pytest.mark.parametrize("name", ACTIVATIONS)
@each_backend
def test_every_activation_that_is_claimed(backend, name):
    x, vector, _ = operands((64, 32, 1), "float32")
    if backend is MOSAIC and name == "a polynomial":
        pytest.skip("of a power, which Mosaic refuses")
    assert backend.serves(x, None, ACTIVATIONS[name]) is None
    assert lowered_sums(backend, ACTIVATIONS[name], x, vector) == 1


@pytest.mark.parametrize("check_vma", [True, False])
@each_backend
def test_between_shards(backend, check_vma):
    """Lowers with the check of what varies over the mesh, and without."""
    x, vector, _ = operands((4096, 32, 1), "float32")
    spec, on = jax.sharding.PartitionSpec("x"), mesh(size=2)

    def both(x, vector):
        vector = jax.lax.pcast(vector, "x", to="varying")
        mean = backend.statistics(x)[1][None, :, None] + 0 * vector
        return backend.vjp_sums(jax.nn.relu, x, vector, vector, x, mean, vector)

    specs = {"in_specs": (spec, jax.sharding.PartitionSpec()), "out_specs": spec}
    mapped = jax.shard_map(both, mesh=on, check_vma=check_vma, **specs)
    assert lowered(mapped, x, vector, on=on) == 4


def test_a_jax_without_the_backend(monkeypatch):
    monkeypatch.setattr("eqx_norm._normalise.gpu.triton.triton", None)
    monkeypatch.setattr("eqx_norm._normalise.gpu.mosaic.plgpu", None)
    x, _, _ = operands((8, 32, 1), "float32")
    assert "no Pallas-Triton" in str(TRITON.serves(x))
    assert f"take jax 0.12, and this is jax {jax.__version__}" in str(MOSAIC.serves(x))
