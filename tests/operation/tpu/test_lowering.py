"""Tests what is lowered for a TPU, on a machine that has none, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm, RMSNorm

of = jax.ShapeDtypeStruct
X = of((6, 256), "bfloat16")


def lowered(function, *arrays, platform="tpu"):
    traced = jax.jit(function).trace(*arrays)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def results(function, *arrays):
    """Returns the number of arrays that each kernel writes."""
    text = lowered(function, *arrays)
    calls = [line for line in text.splitlines() if "@tpu_custom_call" in line]
    return [line.rpartition("->")[-1].count("tensor<") for line in calls]


def f(layer, x):
    for _ in x.shape[:-1]:
        layer = jax.vmap(layer)
    return layer(x)


def grad(f, *places):
    return jax.grad(lambda *a: jnp.sum(f(*a).astype(jnp.float32) ** 2), places)


CASES = [
    (f, X.shape, [1]),
    # Without the sums for weight and bias.
    (grad(f, 1), X.shape, [1, 1]),
    (grad(jax.checkpoint(f), 1), X.shape, [1, 1]),
    (lambda f, x: jax.vmap(jax.grad(lambda x: f(x).sum()))(x), X.shape, [1]),
    (lambda layer, x: jax.jvp(jax.vmap(layer), (x,), (x,)), X.shape, [1]),
    (f, (0, 256), []),
    # Each sum is a total and its rounding error.
    *((grad(f, 0, 1), n, [1, 5]) for n in [(7, 256), (3, 197, 100), (5, 1, 3), (33, 16384)]),
]


@pytest.mark.parametrize(("function", "shape", "expected"), CASES)
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_one_kernel_each_way(kind, function, shape, expected):
    """With 64 bits and strict dtypes, too."""
    for is_wide in (False, True):
        with jax.enable_x64(is_wide), jax.numpy_dtype_promotion("strict"):
            layer = kind(shape[-1], dtype=jnp.float32, implementation="pallas")
            assert results(function, layer, of(shape, "float32")) == expected


def test_inside_shard_map():
    mesh = jax.sharding.AbstractMesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    sharded = of(X.shape, X.dtype, sharding=jax.NamedSharding(mesh, jax.P("x")))
    layer = LayerNorm(256, implementation="pallas")
    with pytest.raises(ValueError, match=r"XLA partitions this program.*jax\.shard_map"):
        lowered(grad(f, 0), layer, sharded)
    specs: Any = {"in_specs": (jax.P(), jax.P("x")), "out_specs": jax.P(), "mesh": mesh}
    assert results(jax.shard_map(grad(f, 0), **specs), layer, X) == [1, 5]


SERVED = "on a TPU it serves LayerNorm and RMSNorm of float32 or bfloat16, without mask"
CUDA, NO_MEAN = "for CUDA devices, and this program is for", "takes the mean, too"
RELU, MASK = {"activation": jax.nn.relu}, {"mask": np.full((), True)}
REFUSED = [
    (LayerNorm, {}, {}, X, "cpu", f"{CUDA} cpu; {SERVED}"),
    (LayerNorm, RELU, {}, X, "tpu", f"{CUDA} tpu; {SERVED}"),
    (LayerNorm, {}, {}, of(X.shape, "float16"), "tpu", f"{CUDA} tpu; {SERVED}"),
    (RMSNorm, {}, {}, X, "cuda", f"{NO_MEAN}; {SERVED}"),
    (RMSNorm, {}, MASK, X, "tpu", f"{NO_MEAN}; {SERVED}"),
    (RMSNorm, {}, {}, of((6, 16385), "float32"), "tpu", "more than 16384 values"),
]


@pytest.mark.parametrize(("kind", "options", "arguments", "x", "platform", "reason"), REFUSED)
def test_refused(kind, options, arguments, x, platform, reason):
    layer = kind(x.shape[-1], **options, implementation="pallas")
    with pytest.raises(ValueError, match=f"implementation='pallas' cannot .*{reason}.*'auto'"):
        lowered(jax.vmap(lambda x: layer(x, **arguments)), x, platform=platform)
