"""Tests what is lowered for a TPU, on a machine that has none, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm, RMSNorm

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


def mapped(layer):
    return jax.vmap(layer)


def grad(f, **where):
    return jax.grad(lambda *a: jnp.sum(f(*a).astype(jnp.float32) ** 2), **where)


PROGRAMS = {
    "forward": (lambda f: f, [1]),
    # Without the sums for weight and bias.
    "gradient of x": (lambda f: grad(f), [1, 1]),
    "remat": (lambda f: grad(jax.checkpoint(f)), [1, 1]),
    "ensemble": (lambda f: lambda x: jax.vmap(grad(f))(jnp.stack([x] * 3)), [1, 1]),
    "scan": (lambda f: lambda x: jax.lax.scan(lambda x, _: (f(x), 0), x, length=2), [1]),
    "forward mode": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), [1]),
}


@pytest.mark.parametrize("program", PROGRAMS)
@each_kind
def test_one_kernel_each_way(kind, program):
    transform, expected = PROGRAMS[program]
    layer = kind(256, implementation="pallas", activation=jax.nn.gelu)
    assert results(transform(mapped(layer)), X) == expected


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


REFUSED = [
    (LayerNorm, X, "cpu", "it is for CUDA devices and TPUs, and this program is for cpu"),
    (RMSNorm, X, "cuda", "it is for TPUs, and this program is for cuda"),
    (LayerNorm, of((0, 256), "float32"), "tpu", "it is empty"),
    (LayerNorm, of((6, 256), "float16"), "tpu", "Mosaic compiles no float16"),
    (LayerNorm, of((6, 16385), "float32"), "tpu", "row of more than 16384 values"),
    (LayerNorm, of((6, 256), "complex64"), "tpu", "the kernel takes float32, bfloat16"),
]


@pytest.mark.parametrize(("kind", "x", "platform", "reason"), REFUSED)
def test_refused(kind, x, platform, reason):
    layer = kind(x.shape[-1], implementation="pallas")
    with pytest.raises(ValueError, match=f"implementation='pallas' cannot .*{reason}.*'auto'"):
        lowered(mapped(layer), x, platform=platform)


@each_kind
def test_masks_are_refused(kind):
    layer, mask = kind((2, 3), implementation="pallas"), np.full(3, True)
    with pytest.raises(ValueError, match="it takes no mask"):
        lowered(lambda x: layer(x, mask=mask), of((2, 3), "float32"))
