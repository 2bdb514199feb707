"""Tests which calls are lowered to kernels for GPUs and TPUs, and which calls are refused."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from eqx_norm._jax.lowering import Target
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.row_norm import Operands, RowNorm, Wanted
from eqx_norm._normalise.kernels.rows import Kernel
from tests.helpers import make

of = jax.ShapeDtypeStruct
CALL = re.compile("@(tpu_custom_call|mosaic_gpu)")
X = of((6, 256), "bfloat16")
CAPABILITY = {"NVIDIA A100": (8, 0), "NVIDIA H200": (9, 0), "NVIDIA B200": (10, 0)}
HAS_MOSAIC = jax.__version_info__ >= (0, 11, 2)
has_mosaic = pytest.mark.skipif(
    not HAS_MOSAIC, reason="make test-newest: the kernels for CUDA devices need jax 0.11.2"
)


@pytest.fixture(params=[pytest.param("cuda", marks=has_mosaic), "tpu"])
def platform(request, monkeypatch):
    assembled_for("NVIDIA H200", monkeypatch)
    return request.param


def assembled_for(kind, monkeypatch):
    """Sets the device that Mosaic GPU lowers for, which otherwise the driver reports."""
    if HAS_MOSAIC:
        from jax.experimental.mosaic.gpu import utils

        monkeypatch.setattr(utils, "_infer_arch", lambda: CAPABILITY[kind])


def lowered(function, *arrays, platform="tpu", on=None):
    mesh = on or jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*arrays)
        return traced.lower(lowering_platforms=(platform,)).as_text()


def results(function, *arrays, **how):
    """Returns the number of arrays that each kernel writes."""
    text = lowered(function, *arrays, **how)
    calls = [line for line in text.splitlines() if CALL.search(line)]
    return [line.rpartition("->")[-1].count("tensor<") for line in calls]


def f(layer, x):
    for _ in x.shape[:-1]:
        layer = jax.vmap(layer)
    return layer(x)


def grad(f, *places):
    return jax.grad(lambda *a: jnp.sum(f(*a).astype(jnp.float32) ** 2), places)


CASES = [
    (f, X.shape, [1]),
    (f, (3, 8192), [1]),
    # Gradients in x alone do not need the sums for weight and bias.
    (grad(f, 1), X.shape, [1, 1]),
    (grad(jax.checkpoint(f), 1), X.shape, [1, 1]),
    (lambda f, x: jax.vmap(jax.grad(lambda x: f(x).sum()))(x), X.shape, [1]),
    (lambda layer, x: jax.jvp(jax.vmap(layer), (x,), (x,)), X.shape, [1]),
    (f, (0, 256), []),
    *((grad(f, 0, 1), n, [1, 3]) for n in [(7, 256), (3, 197, 96), (5, 1, 4), (33, 4608)]),
]


@pytest.mark.parametrize(("function", "shape", "expected"), CASES)
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_one_kernel_forward_and_one_backward(platform, kind, function, shape, expected):
    """Counts kernels also with 64 bits and strict promotion of dtypes."""
    if platform == "tpu":  # each sum is a total and its rounding error
        expected = [{3: 5}.get(n, n) for n in expected]
    for is_wide in (False, True):
        with jax.enable_x64(is_wide), jax.numpy_dtype_promotion("strict"):
            layer = kind(shape[-1], dtype=jnp.float32, implementation="pallas")
            x = of(shape, "float32")
            assert results(function, layer, x, platform=platform) == expected


def rows(kind: Any = LayerNorm, mask=None, **options):
    """Returns a norm of each row of x."""

    def call(x):
        layer = kind(x.shape[1], **options, implementation="pallas")
        return jax.vmap(lambda x: layer(x, mask=mask))(x)

    return call


def batch_norm(mask=None, axis_name: Any = "batch", implementation: Any = "pallas"):
    def call(x):
        how: Any = {"mode": "batch", "implementation": implementation}
        layer, state = make(x.shape[1], axis_name, **how)
        one = lambda x: layer(x, state, mask=mask)  # noqa: E731
        return jax.vmap(one, axis_name="batch", out_axes=(0, None))(x)[0]

    return call


FUSED = "gelu hard_swish leaky_relu relu relu6 sigmoid silu squareplus tanh"


@pytest.mark.parametrize("activation", FUSED.split())
def test_activations_are_fused_into_the_kernels(platform, activation):
    layer = rows(activation=getattr(jax.nn, activation))
    assert results(grad(layer, 0), X, platform=platform) == [1, 1]


NORMS = [
    (LayerNorm(768, implementation="pallas"), (768,), "float32"),
    (GroupNorm(32, 256, activation=jax.nn.silu, implementation="pallas"), (256,), "bfloat16"),
    (InstanceNorm(6, affine=True, implementation="pallas"), (6, 64, 64), "float16"),
]


@has_mosaic
@pytest.mark.parametrize("device", CAPABILITY)
@pytest.mark.parametrize(("layer", "shape", "dtype"), NORMS)
def test_row_kernels_are_lowered_for_each_gpu(device, layer, shape, dtype, monkeypatch):
    assembled_for(device, monkeypatch)
    weights, static = eqx.partition(layer, eqx.is_array)

    def examples(weights, x):
        return jax.vmap(eqx.combine(weights, static))(x)

    x = of((4096, *shape), dtype)
    assert results(grad(examples, 0, 1), weights, x, platform="cuda") == [1, 3]


@has_mosaic
@pytest.mark.parametrize("device", CAPABILITY)
@pytest.mark.parametrize("shape", [(2048, 1024), (3, 32, 96, 14, 14)], ids=["one", "ensemble"])
def test_column_kernels_are_lowered_for_each_gpu(device, shape, monkeypatch):
    assembled_for(device, monkeypatch)
    function = grad(batch_norm(), 0)
    function = function if len(shape) == 2 else jax.vmap(function)
    with jax.enable_x64(device == "NVIDIA H200"):
        assert results(function, of(shape, "float32"), platform="cuda")


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_kernels_are_not_used_unless_requested(implementation):
    for platform in ("cuda", "tpu"):
        layer = LayerNorm(256, implementation=implementation)
        assert results(grad(f, 0, 1), layer, X, platform=platform) == []
        function = batch_norm(implementation=implementation)
        assert results(function, X, platform=platform) == []


def test_kernels_in_programs_that_jit_splits(platform):
    """Tests that each GPU runs the kernel on its shard of x, which XLA:TPU cannot."""
    mesh = jax.sharding.AbstractMesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    sharded = of(X.shape, X.dtype, sharding=jax.NamedSharding(mesh, jax.P("x")))
    layer, how = LayerNorm(256, implementation="pallas"), {"platform": platform, "on": mesh}
    if platform == "cuda":
        assert lowered(grad(f, 0), layer, sharded, **how).count("@CustomSPMDPartitioning(") == 2
        assert "@CustomSPMDPartitioning(" in lowered(batch_norm(), sharded, **how)
    else:
        with pytest.raises(ValueError, match=r"XLA partitions this program.*jax\.shard_map"):
            lowered(grad(f, 0), layer, sharded, **how)
    specs: Any = {"in_specs": (jax.P(), jax.P("x")), "out_specs": jax.P(), "mesh": mesh}
    for check_vma in (True, False):
        split = jax.shard_map(grad(f, 0), **specs, check_vma=check_vma)
        assert len(results(split, layer, X, **how)) == 2
    if platform == "cuda":
        specs |= {"in_specs": jax.P("x"), "out_specs": jax.P("x")}
        split = jax.shard_map(batch_norm(axis_name=("batch", "x")), **specs)
        assert results(split, X, **how)


MASK = np.full((), True)
REFUSED = [
    (rows(), X, "cpu", "for CUDA devices and TPUs, and this program is for cpu"),
    (rows(), of(X.shape, "float16"), "tpu", "TPUs takes float32, bfloat16"),
    (rows(mask=MASK), X, "cuda", "no kernel takes a mask"),
    (rows(RMSNorm, MASK), X, "tpu", "no kernel takes a mask"),
    (rows(RMSNorm, axis=0), of((6, 4, 256), "float32"), "cuda", r"channels \(axis=0\)"),
    (rows(InstanceNorm), of((6, 256, 4), "bfloat16"), "tpu", "serves LayerNorm and RMSNorm"),
    (rows(RMSNorm), of((6, 16385), "float32"), "tpu", "more than 16384 values"),
    (rows(activation=jax.nn.softmax), X, "cuda", "show that it is elementwise"),
    (rows(activation=jax.nn.softplus), X, "tpu", "no kernel computes log1p, w"),
    (batch_norm(), X, "tpu", "for CUDA devices, and this program is for tpu"),
    (batch_norm(MASK), X, "cuda", "no kernel takes a mask"),
]
REFUSED_BY_MOSAIC = [
    (rows(), of((6, 1001), "float32"), "cuda", "it serves lengths up to 8192"),
    (batch_norm(), of((64, 33), "bfloat16"), "cuda", "its number of channels is odd"),
]
NEEDED = r"need jax 0\.11\.2 or later"
REFUSED_BY_OLDER_JAX = [(rows(), X, "cuda", NEEDED), (batch_norm(), X, "cuda", NEEDED)]


@pytest.mark.parametrize(
    ("function", "x", "on", "reason"),
    REFUSED + (REFUSED_BY_MOSAIC if HAS_MOSAIC else REFUSED_BY_OLDER_JAX),
)
def test_refusals(function, x, on, reason):
    with pytest.raises(ValueError, match=f"implementation='pallas' cannot .*{reason}.*'auto'"):
        lowered(function, x, platform=on)


def test_a_row_that_devices_split_is_refused():
    """Tests what XLA's partitioner raises in a program that `jit` splits."""
    x = jnp.zeros((4, 8))
    at, layout = Operands(x, x[:1], x[:1]), Layout((8,), 1, 1)
    target = Target("other", ["tpu"], 1, True, over=[("values",), ()])
    with pytest.raises(ValueError, match="the mesh splits the values of a row"):
        Kernel.of(target, layout, RowNorm(1e-5, True), at, Wanted())
