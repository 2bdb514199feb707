"""Tests which calls are lowered to kernels for GPUs and TPUs, and which calls are refused."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from tests.helpers import make, over_batch

of = jax.ShapeDtypeStruct
CALL = re.compile("@(tpu_custom_call|mosaic_gpu)")
X = of((6, 256), "bfloat16")
CAPABILITY = {"NVIDIA A100": (8, 0), "NVIDIA H200": (9, 0), "NVIDIA B200": (10, 0)}
has_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="make test-newest: the kernels need jax 0.11.2"
)


@pytest.fixture(params=["cuda", "tpu"])
def platform(request, monkeypatch):
    if request.param == "cuda" and jax.__version_info__ < (0, 11, 2):
        pytest.skip("make test-newest: the kernels for CUDA devices need jax 0.11.2")
    assembled_for("NVIDIA H200", monkeypatch)
    return request.param


def assembled_for(kind, monkeypatch):
    """Sets the device that Mosaic GPU lowers for, which otherwise the driver reports."""
    if jax.__version_info__ >= (0, 11, 2):
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


ACTIVATIONS = [
    *(
        jax.nn.gelu,
        jax.nn.hard_swish,
        jax.nn.leaky_relu,
        jax.nn.relu,
        jax.nn.relu6,
        jax.nn.sigmoid,
    ),
    *(jax.nn.silu, jax.nn.squareplus, jax.nn.tanh),
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_fused_into_the_kernels(platform, activation):
    layer = LayerNorm(256, activation=activation, implementation="pallas")
    weights, static = eqx.partition(layer, eqx.is_array)
    of_weights = lambda weights, x: f(eqx.combine(weights, static), x)  # noqa: E731
    assert results(grad(of_weights, 1), weights, X, platform=platform) == [1, 1]


NORMS = {
    "LayerNorm": (LayerNorm(768, implementation="pallas"), (768,)),
    "RMSNorm": (RMSNorm(8192, use_weight=False, implementation="pallas"), (8192,)),
    "GroupNorm": (GroupNorm(32, 256, activation=jax.nn.silu, implementation="pallas"), (256,)),
    "InstanceNorm": (InstanceNorm(6, affine=True, implementation="pallas"), (6, 64, 64)),
}


@has_mosaic
@pytest.mark.parametrize("kind", CAPABILITY)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_row_kernels_are_lowered_for_each_gpu(kind, name, dtype, monkeypatch):
    assembled_for(kind, monkeypatch)
    (layer, shape), how = NORMS[name], {"platform": "cuda"}
    weights, static = eqx.partition(layer, eqx.is_array)
    given = weights, of((4096, *shape), dtype)

    def examples(weights, x):
        return jax.vmap(eqx.combine(weights, static))(x)

    assert results(examples, *given, **how) == [1]
    if shape != (8192,):  # no backward kernel serves this length
        assert results(grad(examples, 0, 1), *given, **how) == [1, 3]


def norm(shape=(2048, 1024), axis_name: Any = "batch", implementation: Any = "pallas"):
    def f(x):
        layer, state = make(shape[1], axis_name, mode="batch", implementation=implementation)
        return over_batch(layer)(x, state)

    return f, of(shape, "float32")


def grad_of_sum(f):
    return jax.grad(lambda x: jnp.sum(jax.tree.leaves(f(x))[0] ** 2))


PROGRAMS = {
    "forward and backward": grad_of_sum,
    "ensemble": lambda f: lambda x: jax.vmap(grad_of_sum(f))(jnp.stack([x] * 3)),
    "scan": lambda f: (
        lambda x: jax.lax.scan(lambda x, _: (grad_of_sum(f)(x), None), x, length=2)
    ),
    "remat": lambda f: grad_of_sum(jax.checkpoint(f)),
    "second order": lambda f: grad_of_sum(grad_of_sum(f)),
    "forward mode": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
}


@has_mosaic
@pytest.mark.parametrize("kind", CAPABILITY)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("shape", [(2048, 1024), (32, 96, 14, 14)], ids=str)
def test_column_kernels_are_lowered_for_each_gpu(kind, program, shape, monkeypatch):
    assembled_for(kind, monkeypatch)
    function, x = norm(shape)
    with jax.enable_x64(kind == "NVIDIA H200"):
        assert results(PROGRAMS[program](function), x, platform="cuda")


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_kernels_are_not_used_unless_requested(implementation):
    for platform in ("cuda", "tpu"):
        layer = LayerNorm(256, implementation=implementation)
        assert results(grad(f, 0, 1), layer, X, platform=platform) == []
        function, x = norm(implementation=implementation)
        assert results(function, x, platform=platform) == []


def test_kernels_refuse_operands_sharded_by_jit(platform):
    mesh = jax.sharding.AbstractMesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    sharded = of(X.shape, X.dtype, sharding=jax.NamedSharding(mesh, jax.P("x")))
    layer, how = LayerNorm(256, implementation="pallas"), {"platform": platform, "on": mesh}
    with pytest.raises(ValueError, match=r"XLA partitions this program.*jax\.shard_map"):
        lowered(grad(f, 0), layer, sharded, **how)
    specs: Any = {"in_specs": (jax.P(), jax.P("x")), "out_specs": jax.P(), "mesh": mesh}
    for check_vma in (True, False):
        split = jax.shard_map(grad(f, 0), **specs, check_vma=check_vma)
        assert len(results(split, layer, X, **how)) == 2


@has_mosaic
def test_column_kernel_inside_shard_map(monkeypatch):
    assembled_for("NVIDIA H200", monkeypatch)
    mesh = jax.sharding.AbstractMesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    function, x = norm(axis_name=("batch", "x"))
    specs: Any = {"in_specs": jax.P("x"), "out_specs": jax.P("x"), "mesh": mesh}
    split = jax.shard_map(lambda x: function(x)[0], **specs)
    assert results(split, x, platform="cuda", on=mesh)


MASK = {"mask": np.full((), True)}
REFUSED = [
    (LayerNorm, {}, {}, X, "cpu", "for CUDA devices and TPUs, and this program is for cpu"),
    (LayerNorm, {}, {}, of(X.shape, "float16"), "tpu", "TPUs takes float32, bfloat16"),
    (LayerNorm, {}, MASK, X, "cuda", "no kernel takes a mask"),
    (RMSNorm, {}, MASK, X, "tpu", "no kernel takes a mask"),
    (RMSNorm, {"axis": 0}, {}, of((6, 4, 256), "float32"), "cuda", r"channels \(axis=0\)"),
    (InstanceNorm, {}, {}, of((6, 256, 4), "bfloat16"), "tpu", "serves LayerNorm and RMSNorm"),
    (RMSNorm, {}, {}, of((6, 16385), "float32"), "tpu", "more than 16384 values"),
    (LayerNorm, {"activation": jax.nn.softmax}, {}, X, "cuda", "show that it is elementwise"),
    (LayerNorm, {"activation": jax.nn.softplus}, {}, X, "tpu", "no kernel computes log1p, w"),
]


@pytest.mark.parametrize(("kind", "options", "arguments", "x", "on", "reason"), REFUSED)
def test_row_kernel_refusals(kind, options, arguments, x, on, reason):
    layer = kind(x.shape[1], **options, implementation="pallas")
    with pytest.raises(ValueError, match=f"implementation='pallas' cannot .*{reason}.*'auto'"):
        lowered(jax.vmap(lambda x: layer(x, **arguments)), x, platform=on)


@has_mosaic
def test_row_kernels_refuse_lengths_that_no_tile_divides(monkeypatch):
    assembled_for("NVIDIA H200", monkeypatch)
    x = of((6, 1001), "float32")
    test_row_kernel_refusals(LayerNorm, {}, {}, x, "cuda", "it serves lengths up to 8192")


@pytest.mark.skipif(jax.__version_info__ >= (0, 11, 2), reason="the kernels are served")
@pytest.mark.parametrize("program", [norm(), (f, X)], ids=["columns", "rows"])
def test_kernel_error_names_the_required_jax_version(program):
    function, x = program
    if function is f:
        function = functools.partial(f, LayerNorm(256, implementation="pallas"))
    with pytest.raises(ValueError, match=r"need jax 0\.11\.2 or later.*'auto'"):
        lowered(function, x, platform="cuda")


NO_COLUMNS = [
    ((64, 32), "float32", "tpu", None, "for CUDA devices, and this program is for tpu"),
    ((64, 33), "bfloat16", "cuda", None, "its number of channels is odd"),
    ((64, 32), "float32", "cuda", np.full((), True), "no kernel takes a mask"),
]


@has_mosaic
@pytest.mark.parametrize(("shape", "dtype", "on", "mask", "reason"), NO_COLUMNS)
def test_column_kernel_refusals(shape, dtype, on, mask, reason):
    layer, state = make(shape[1], "batch", mode="batch", implementation="pallas")
    call = jax.vmap(lambda x: layer(x, state, mask=mask), axis_name="batch", out_axes=(0, None))
    with pytest.raises(ValueError, match=f"implementation='pallas' cannot .*{reason}.*'auto'"):
        lowered(call, of(shape, dtype), platform=on)
