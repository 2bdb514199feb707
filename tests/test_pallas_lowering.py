"""The Pallas-Triton kernels are lowered for GPUs that are not there.

What passes Pallas's interpreter may fail in Triton: that it does not is tested here as far as
it can be without CUDA's compiler. The rest: experiments/compiled.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

from eqx_norm._normalise import kernels, pallas_triton, tiling

CALL = "__gpu$xla.gpu.triton"
CORES = {"NVIDIA A100-SXM4-80GB": 108, "NVIDIA H200": 132, "NVIDIA B200": 148}
H200 = "NVIDIA H200"
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
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "celu": jax.nn.celu,
    "selu": jax.nn.selu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "mish": jax.nn.mish,
    "softplus": jax.nn.softplus,
    "squareplus": jax.nn.squareplus,
    "sparse_plus": jax.nn.sparse_plus,
    "soft_sign": jax.nn.soft_sign,
    "tanh": jnp.tanh,
    "hard_tanh": jax.nn.hard_tanh,
    "sigmoid": jax.nn.sigmoid,
    "log_sigmoid": jax.nn.log_sigmoid,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_silu": jax.nn.hard_silu,
    "a polynomial": lambda u: u**3 - 2 * jnp.square(u) + jnp.abs(u) ** 1.5,
    "waves": lambda u: jnp.sin(u) + jnp.cos(2 * u) + jnp.exp2(u),
    "a selection": lambda u: jnp.where((u > 0) & (u != 1) | (u <= -1), u, -0.1 * u),
    "clipped": lambda u: jnp.clip(u, -1, 1) * jax.lax.stop_gradient(jnp.sign(u)),
    "logarithms": lambda u: jnp.log(u) + jnp.log1p(u) + jnp.expm1(u) + jax.lax.rsqrt(u),
    "checkpointed": jax.checkpoint(lambda u: jax.nn.silu(u)),
}


def mesh(kind=H200, size=1):
    """So that jax knows what GPU is meant; before 0.11 it took any."""
    automatic = (jax.sharding.AxisType.Auto,)
    if jax.__version_info__ < (0, 11):
        return jax.sharding.AbstractMesh((size,), ("x",), automatic)
    device = jax.sharding.AbstractDevice(
        device_kind=kind, num_cores=CORES[kind], platform="gpu"
    )
    return jax.sharding.AbstractMesh((size,), ("x",), automatic, abstract_device=device)


def lowered(function, *arrays, on=None):
    """How many kernels it is lowered to."""
    with jax.sharding.use_abstract_mesh(on or mesh()), kernels.quiet():
        traced = jax.jit(function).trace(*arrays)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count(CALL)


def operands(shape, dtype, *, masked=False):
    """x, the vector, and a mask or none."""
    vector = jax.ShapeDtypeStruct((*shape[:-3], 1, shape[-2], 1), "float32")
    mask = jax.ShapeDtypeStruct((*shape[:-2], 1, shape[-1]), "bool")
    return jax.ShapeDtypeStruct(shape, dtype), vector, [mask] * masked


def pulled_sums(activation, x, vector, mask, **keywords):
    function = functools.partial(pallas_triton.pulled_sums, activation)
    return lowered(function, x, vector, vector, x, vector, vector, *mask, **keywords)


@pytest.mark.parametrize("kind", CORES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(65536, 256, 1), (8192, 1, 1, 768)])
def test_on_each_gpu(kind, dtype, shape):
    x, vector, mask = operands(shape, dtype)
    merged = len(shape) == 3
    assert lowered(pallas_triton.statistics, x, *mask, on=mesh(kind)) == 1 + merged
    assert pulled_sums(jax.nn.relu, x, vector, mask, on=mesh(kind)) == 1 + merged


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, masked):
    x, vector, mask = operands(shape, "bfloat16", masked=masked)
    assert lowered(pallas_triton.statistics, x, *mask) in (1, 2)
    assert pulled_sums(None, x, vector, mask) in (1, 2)


def test_a_merge_of_merges(monkeypatch):
    monkeypatch.setattr(tiling, "_CHUNKS", 1)
    x, vector, mask = operands((2**20, 8, 1), "float32")
    assert lowered(pallas_triton.statistics, x) == 3
    assert pulled_sums(None, x, vector, mask) == 3


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_that_is_claimed(name):
    x, vector, mask = operands((64, 32, 1), "float32")
    assert pallas_triton.serves(x, None, ACTIVATIONS[name]) is None
    assert pulled_sums(ACTIVATIONS[name], x, vector, mask) == 1


def test_between_shards():
    """With its check of what varies over the mesh, and without."""
    x, vector, _ = operands((1024, 33, 1), "float32")
    spec = jax.sharding.PartitionSpec("x")

    def both(x, vector):
        mean = pallas_triton.statistics(x)[1][None, :, None]
        vector = jax.lax.pcast(vector, "x", to="varying")
        mean = mean + 0 * vector
        return pallas_triton.pulled_sums(jax.nn.relu, x, vector, vector, x, mean, vector)

    for check in (True, False):
        mapped = jax.shard_map(
            both,
            mesh=mesh(size=2),
            in_specs=(spec, jax.sharding.PartitionSpec()),
            out_specs=spec,
            check_vma=check,
        )
        assert lowered(mapped, x, vector, on=mesh(size=2)) == 4


@pytest.mark.parametrize("shape", [(1021, 33, 1), (3, 1, 1, 100003)])
def test_with_64_bits_and_strict_dtypes(shape):
    x, vector, mask = operands(shape, "bfloat16", masked=True)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert lowered(pallas_triton.statistics, x, *mask) == 2
        assert pulled_sums(jax.nn.silu, x, vector, mask) == 2


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="not deprecated yet")
def test_that_it_is_deprecated_is_not_the_user_s_affair():
    """Once jax says nothing, `quiet` has to go."""
    x, _, _ = operands((64, 32, 1), "float32")
    with (
        jax.sharding.use_abstract_mesh(mesh()),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        jax.jit(pallas_triton.statistics).trace(x).lower(lowering_platforms=("cuda",))
    assert "deprecated" in str(caught[0].message)
