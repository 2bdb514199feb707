"""Tests what is lowered for CUDA devices, on a machine that has none, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eqx_norm import LayerNorm
from eqx_norm._normalise.gpu import choice, kernel, tiling
from eqx_norm._normalise.passes import Target
from tests.helpers import make, over_batch

CORES = {"NVIDIA A100-SXM4-80GB": 108, "NVIDIA H200": 132, "NVIDIA B200": 148}
of = jax.ShapeDtypeStruct


def mesh(kind="NVIDIA H200", size=1):
    """Tells jax what GPU is meant, which need not be there; before 0.11 it took any."""
    here = {}
    if jax.__version_info__ >= (0, 11):
        device = {"device_kind": kind, "num_cores": CORES[kind], "platform": "gpu"}
        here["abstract_device"] = jax.sharding.AbstractDevice(**device)
    automatic = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((size,), ("x",), automatic, **here)


def kernels(function, *arrays, on=None):
    """Returns how many there are in what XLA would be given for a CUDA device."""
    with jax.sharding.use_abstract_mesh(on or mesh()):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("__gpu$xla.gpu.triton")


@pytest.mark.parametrize("kind", CORES)
def test_lowered_for_each_gpu(kind, monkeypatch):
    for dtype in ("float32", "bfloat16", "float16"):
        assert kernels(kernel.statistics, of((1, 65536, 256), dtype), on=mesh(kind)) == 2
    monkeypatch.setattr(tiling, "_CHUNKS", 1)  # for a merge of merges
    assert kernels(kernel.statistics, of((1, 2**20, 32), "float32")) == 3


# With and without a remainder, in one chunk or many, merged or not.
SHAPES = [(1, 4097, 64), (1, 1021, 33), (32, 3136, 64), (3, 77, 3), (8192, 768, 1), (5, 1, 7)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_with_64_bits_and_strict_dtypes(shape):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert kernels(kernel.statistics, of(shape, jnp.bfloat16)) in (1, 2)


def norm(shape=(2048, 1024), axis_name: Any = "batch", implementation: Any = "pallas"):
    def f(x):
        layer, state = make(shape[1], axis_name, mode="batch", implementation=implementation)
        return over_batch(layer)(x, state)

    return f, of(shape, "float32")


def layer_norm(implementation: Any = "pallas"):
    return jax.vmap(LayerNorm(768, implementation=implementation)), of((4096, 768), "bfloat16")


def grad(f):
    return jax.grad(lambda x: jnp.sum(jax.tree.leaves(f(x))[0] ** 2))


PROGRAMS = {
    "forward and backward": grad,
    "ensemble": lambda f: lambda x: jax.vmap(grad(f))(jnp.stack([x] * 3)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda x, _: (grad(f)(x), None), x, length=2),
    "remat": lambda f: grad(jax.checkpoint(f)),
    "second order": lambda f: grad(grad(f)),
    "forward mode": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("shape", [(2048, 1024), (32, 100, 14, 14)], ids=str)
def test_taken_where_it_is_asked_for(program, shape):
    f, x = norm(shape)
    assert kernels(program(f), x) > 0


@pytest.mark.parametrize("implementation", ["auto", "xla"])
@pytest.mark.parametrize("layer", [norm, layer_norm])
def test_not_taken_else(layer, implementation):
    assert kernels(*layer(implementation=implementation)) == 0


def test_taken_by_layer_norm():
    assert kernels(*layer_norm()) > 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_operands_that_jit_has_sharded_are_not_gathered(check_vma):
    on, (f, x) = mesh(size=2), norm()
    sharded = of(x.shape, x.dtype, sharding=jax.NamedSharding(on, jax.P("x")))
    with pytest.raises(ValueError, match=r"XLA partitions this program.*jax\.shard_map"):
        kernels(f, sharded, on=on)
    f, x = norm(axis_name=("batch", "x"))
    specs: Any = {"in_specs": jax.P("x"), "out_specs": jax.P("x"), "check_vma": check_vma}
    assert kernels(jax.shard_map(lambda x: f(x)[0], mesh=on, **specs), x, on=on) > 0


def chosen(shape=(64, 32, 1), dtype="float32", mask=None, platform="cuda") -> Any:
    kept = (1, *shape[1:-1], 1)
    target = Target("gpu", (platform,), is_partitioned=False, is_known=True)
    return choice.statistics(target, of(shape, dtype), mask, shape=kept)


REFUSED = [
    ({"platform": "cpu"}, "it is for CUDA devices, and this program is for cpu"),
    ({"dtype": "float64"}, "x is float64, and the kernel takes"),
    ({"mask": of((64, 1, 1), bool)}, "it takes no mask"),
    ({"shape": (0, 32, 1)}, "it is empty"),
    ({"shape": (2**16, 32, 2**16)}, "more rows than a kernel can count"),
]


@pytest.mark.parametrize(("asked", "reason"), REFUSED)
def test_refused(asked, reason):
    with pytest.raises(ValueError, match=f"implementation='pallas' cannot .*{reason}.*'auto'"):
        chosen(**asked)
