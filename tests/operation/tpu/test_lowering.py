"""Tests what is lowered for a TPU, on a machine that has none, and what is refused."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import GroupNorm, LayerNorm, RMSNorm

of = jax.ShapeDtypeStruct
X = of((6, 256), "bfloat16")
each_kind = pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])


def lowered(function, *arrays, platform="tpu"):
    traced = jax.jit(function).trace(*arrays)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def results(function, *arrays):
    """Returns the number of arrays that each kernel writes."""
    text = lowered(function, *arrays)
    calls = [line for line in text.splitlines() if "@tpu_custom_call" in line]
    return [line.rpartition("->")[-1].count("tensor<") for line in calls]


def grad(f, **where):
    return jax.grad(lambda *a: jnp.sum(f(*a).astype(jnp.float32) ** 2), **where)


PROGRAMS = {
    "forward": (lambda f: f, [1]),
    # Without the sums for weight and bias.
    "gradient of x": (lambda f: grad(f), [1, 1]),
    "remat": (lambda f: grad(jax.checkpoint(f)), [1, 1]),
    "three gradients": (lambda f: lambda x: jax.vmap(grad(f))(jnp.stack([x] * 3)), [1, 1]),
    "scan": (lambda f: lambda x: jax.lax.scan(lambda x, _: (f(x), 0), x, length=2), [1]),
    "forward mode": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), [1]),
    "no rows": (lambda f: lambda x: f(x[:0]), []),
}


@pytest.mark.parametrize("program", PROGRAMS)
@each_kind
def test_one_kernel_each_way(kind, program):
    transform, expected = PROGRAMS[program]
    assert results(transform(jax.vmap(kind(256, implementation="pallas"))), X) == expected


@each_kind
@pytest.mark.parametrize("shape", [(7, 256), (3, 197, 100), (5, 1, 3), (33, 16384)], ids=str)
def test_sums_for_weights_in_the_same_kernel(kind, shape):
    """With 64 bits and strict dtypes, too. Each sum is a total and its rounding error."""
    x = of(shape, "float32")

    def f(layer, x):
        for _ in shape[:-1]:
            layer = jax.vmap(layer)
        return layer(x)

    for is_wide in (False, True):
        with jax.enable_x64(is_wide), jax.numpy_dtype_promotion("strict"):
            layer = kind(shape[-1], dtype=jnp.float32, implementation="pallas")
            assert results(grad(f, argnums=(0, 1)), layer, x) == [1, 5]
    assert results(grad(f, argnums=(0, 1)), kind(shape[-1]), x) == []


def test_weights_that_differ_have_no_kernel():
    layers = eqx.filter_vmap(lambda _: LayerNorm(256, implementation="pallas"))(jnp.arange(3))
    assert results(lambda x: eqx.filter_vmap(lambda f: jax.vmap(f)(x))(layers), X) == []


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    mesh = jax.sharding.AbstractMesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    sharded = of(X.shape, X.dtype, sharding=jax.NamedSharding(mesh, jax.P("x")))
    layer = LayerNorm(256, implementation="pallas")
    f = grad(lambda layer, x: jax.vmap(layer)(x))
    with pytest.raises(ValueError, match=r"XLA partitions this program.*jax\.shard_map"):
        lowered(f, layer, sharded)

    def step(layer, x):
        gradient = f(layer, x)
        return gradient if check_vma else jax.lax.psum(gradient, "x")

    how: Any = {"in_specs": (jax.P(), jax.P("x")), "out_specs": jax.P(), "mesh": mesh}
    assert results(jax.shard_map(step, check_vma=check_vma, **how), layer, X) == [1, 5]


PLAIN = "on a TPU it serves LayerNorm and RMSNorm of float32 or bfloat16, without mask and act"
LAYER = LayerNorm(256, implementation="pallas")
RMS = RMSNorm(256, implementation="pallas")
RELU, GROUPS = (
    LayerNorm(256, activation=jax.nn.relu, implementation="pallas"),
    GroupNorm(2, 256, implementation="pallas"),
)
LONG = LayerNorm(16385, implementation="pallas")
MASK = np.full((), True)
REFUSED = {
    "cpu": (LAYER, X, "cpu", f"it is for CUDA devices, and this program is for cpu; {PLAIN}"),
    "cuda": (RMS, X, "cuda", f"takes the mean, too; {PLAIN}"),
    "activation": (RELU, X, "tpu", f"this program is for tpu; {PLAIN}"),
    "groups": (GROUPS, X, "tpu", f"this program is for tpu; {PLAIN}"),
    "mask": (lambda x: RMS(x, mask=MASK), X, "tpu", f"takes the mean, too; {PLAIN}"),
    "float16": (LAYER, of((6, 256), "float16"), "tpu", f"this program is for tpu; {PLAIN}"),
    "long": (LONG, of((6, 16385), "float32"), "tpu", "row of more than 16384 values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    layer, x, platform, reason = REFUSED[case]
    with pytest.raises(ValueError, match=f"implementation='pallas' cannot .*{reason}.*'auto'"):
        lowered(jax.vmap(layer), x, platform=platform)
