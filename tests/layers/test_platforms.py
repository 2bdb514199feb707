"""Tests what a GPU and a TPU get, on a machine that has none.

JAX lowers every layer for both: each direction and dtype, with and without mask, activation and
weights. And a CPU runs what was lowered for them, which is as exact as its own programs: what
they compile of it, `make gpu-compile-check` and `make tpu-compile-check` count.
"""

import functools
import math
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from eqx_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from tests import exact
from tests.compiling import lowered_for
from tests.exact import Answer
from tests.helpers import APPROACHES, bits, copy, make
from tests.layers.accuracy import (
    BOUNDS,
    check,
    far_from_zero,
    make_batch,
    seeds,
    train,
    with_outlier,
)

pytestmark = pytest.mark.x32  # has its own dtypes

N, C, H, W = 2, 4, 3, 5
SHAPE = C, H, W


def batch_norm(approach):
    def made(weights, **how):
        layer, state = make(C, "batch", channelwise_affine=weights, approach=approach, **how)
        return lambda layer, x, mask: layer(x, copy(state), mask=mask)[0], layer

    return made


def alone(kind, *arguments, names):
    """Returns a maker of a norm of one example; `names`: the arguments for its weights."""

    def made(weights, **how):
        layer = kind(*arguments, **dict.fromkeys(names, weights), **how)
        return lambda layer, x, mask: layer(x, mask=mask), layer

    return made


# Mask, weights, activation: all pairs of two are among them.
SILU = jax.nn.silu
PAIRS = (False, False, None), (False, True, SILU), (True, False, SILU), (True, True, None)
BOTH = "use_weight", "use_bias"
LAYERS = {name: batch_norm(name) for name in APPROACHES} | {
    "LayerNorm": alone(LayerNorm, SHAPE, names=BOTH),
    "LayerNorm of vectors": alone(LayerNorm, W, names=BOTH),
    "RMSNorm": alone(RMSNorm, SHAPE, names=BOTH),
    "GroupNorm": alone(GroupNorm, 2, C, names=["channelwise_affine"]),
    "InstanceNorm": alone(InstanceNorm, C, names=["affine"]),
}


def directions(call, layer, masked, dtype):
    """Returns y and all derivatives of a layer as functions of x, in one function."""
    weights, static = eqx.partition(layer, eqx.is_inexact_array)
    shape = (W,) if getattr(layer, "shape", None) == (W,) else SHAPE
    mask = jnp.arange(W) > 0 if masked and len(shape) > 1 else None

    def forward(weights, x):
        f = lambda x: call(eqx.combine(weights, static), x, mask)  # noqa: E731
        return jax.vmap(f, axis_name="batch")(x)

    def every(x):
        loss = lambda weights, x: jnp.sum(forward(weights, x) ** 2, dtype=float)  # noqa: E731
        return (
            forward(weights, x),
            jax.grad(loss, (0, 1))(weights, x),
            jax.grad(loss, 1)(weights, x),
            jax.jvp(forward, (weights, x), (weights, x)),
        )

    return every, jax.ShapeDtypeStruct((N, *shape), dtype)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lowered_for_every_platform(name, dtype):
    for masked, weights, activation in PAIRS:
        call, layer = LAYERS[name](weights, activation=activation)
        f, x = directions(call, layer, masked, dtype)
        jax.jit(f).trace(x).lower(lowering_platforms=("cuda", "tpu"))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "layer", [LayerNorm(W), GroupNorm(2, C, 1e-5, False), RMSNorm(W, use_weight=False)]
)
def test_over_devices(layer, kind):
    """Inside `shard_map` a GPU has the program of one device; `jit` keeps the passes, which XLA
    can split."""
    x = jax.ShapeDtypeStruct((N, *(SHAPE if isinstance(layer, GroupNorm) else (W,))), "float32")
    on = jax.sharding.AbstractMesh((2,), ("x",), (kind,))
    split = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(on, jax.P("x")))

    def f(x):
        return jax.vmap(layer)(x), jax.grad(lambda x: jnp.sum(jax.vmap(layer)(x) ** 2))(x)

    how: Any = {"mesh": on, "in_specs": jax.P("x"), "out_specs": jax.P("x")}
    programs = {f: False}
    if kind == AxisType.Auto:
        programs |= {jax.shard_map(f, check_vma=check, **how): True for check in (True, False)}
    for program, has_own in programs.items():
        with jax.sharding.use_abstract_mesh(on):
            traced = jax.jit(program).trace(split)
            assert is_one_kernel(traced) == has_own
            traced.lower(lowering_platforms=("tpu",))


def is_one_kernel(traced):
    """Returns whether a program for a GPU starts from the largest value of each row."""
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return "applies stablehlo.maximum" in text


# ------------------------------------------------------------------ values, within all bounds

each_platform = pytest.mark.parametrize("platform", ["cuda", "tpu"])
few_examples = hypothesis.settings(max_examples=4)


def rows(draw, random, shape, *how):
    """Returns what is drawn for channels, for the examples of a norm of one example."""
    drawn = draw(random, (math.prod(shape[1:]), shape[0]), *how).T
    return np.ascontiguousarray(drawn.reshape(shape))


def columns(draw, random, shape, *how):
    return draw(random, shape, *how)


def hard(random, shape, draw=columns):
    """Yields values whose mean, range or first value makes rounding errors large."""
    yield draw(far_from_zero, random, shape)
    yield draw(with_outlier, random, shape, 0)
    yield (300 + random.standard_normal(shape)).astype(np.float16)
    yield (300 * random.standard_normal(shape)).astype(np.float16)
    yield (100 + random.standard_normal(shape)).astype(jnp.bfloat16)


@each_platform
@pytest.mark.parametrize("shape", [(7, 8), (3, 8, 2, 2)], ids=str)  # a CPU adds in a row
@hypothesis.given(seeds)
@few_examples
def test_batch_norm_in_training(platform, shape, seed):
    random = np.random.default_rng(seed)
    for x in hard(random, shape):
        batch = make_batch(random, x, affine=x.dtype == np.float32)
        check(batch, platform=platform)
    mask = np.arange(math.prod(shape) // shape[1]).reshape(shape[0], *shape[2:]) % 3 != 0
    batch = make_batch(random, far_from_zero(random, shape))
    np.moveaxis(batch.x, 1, -1)[~mask] = np.nan
    check(batch, mask, platform=platform)


@each_platform
@hypothesis.given(seeds)
@few_examples
def test_layer_norm_in_training(platform, seed):
    random = np.random.default_rng(seed)
    for x in hard(random, (8, 121), rows):
        batch = make_batch(random, x, affine=x.dtype == np.float32)
        check(batch, layer="LayerNorm", platform=platform)


@each_platform
@pytest.mark.parametrize("shape", [(7, 8), (121, 8), (8, 8, 5, 5)], ids=str)
def test_constant_channels_in_training(platform, shape):
    """1/n, rounded, would give another mean: https://github.com/BVLC/caffe/issues/3963."""
    constants = np.array([1e-3, 0.1, 1 / 3, 300.0, 65504.0, 1.0, 1e4, 7.0], np.float32)
    of_channels = (-1, *(1,) * (len(shape) - 2))
    x = np.broadcast_to(constants.reshape(of_channels), shape).copy()
    batch = make_batch(np.random.default_rng(0), x)
    answer, _ = train(batch, platform=platform)
    assert not np.asarray(answer.variance).any()
    assert bits(answer.y) == bits(np.broadcast_to(batch.bias.reshape(of_channels), shape))


# On a GPU, y that nobody differentiates and the gradient of x alone are a program of their own.
ALONE = {
    "LayerNorm": (LayerNorm, (121,), exact.layer_norm),
    "LayerNorm of an image": (LayerNorm, ((3, 5, 7),), exact.layer_norm),
    "RMSNorm": (RMSNorm, (121,), exact.rms_norm),
    "GroupNorm": (GroupNorm, (2, 6), functools.partial(exact.group_norm, groups=2)),
    "InstanceNorm": (
        functools.partial(InstanceNorm, affine=True),
        (6,),
        functools.partial(exact.group_norm, groups=6),
    ),
}


@functools.cache
def program(name, activation=None):
    kind, arguments, _ = ALONE[name]
    layer: Any = kind(*arguments, activation=activation)

    def y_and_dx(weight, bias, x, dy):
        moved = eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, (weight, bias))
        dx = jax.vjp(jax.vmap(moved), x)[1](dy.astype(x.dtype))[0]
        return jax.vmap(moved)(x), dx

    of = jax.ShapeDtypeStruct
    shape = (6, 5, 7) if name in ("GroupNorm", "InstanceNorm") else layer.weight.shape
    vector, x = of(layer.weight.shape, "float32"), of((8, *shape), "float32")
    assert is_one_kernel(jax.jit(y_and_dx).trace(vector, vector, x, x))
    return y_and_dx, lowered_for("cuda", y_and_dx), layer.weight.shape, x.shape


@pytest.mark.parametrize("name", ALONE)
def test_one_kernel_with_an_activation(name):
    here, run, of_weights, shape = program(name, jax.nn.silu)
    random = np.random.default_rng(0)
    weight, bias = random.uniform(0.5, 1.5, (2, *of_weights)).astype(np.float32)
    x, dy = random.standard_normal((2, *shape)).astype(np.float32)
    for result, right in zip(
        run(weight, bias, x, dy), jax.jit(here)(weight, bias, x, dy), strict=True
    ):
        np.testing.assert_allclose(result, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALONE)
@hypothesis.given(seeds)
@few_examples
def test_one_kernel(name, seed):
    _, run, of_weights, shape = program(name)
    random = np.random.default_rng(seed)
    for x in hard(random, shape, rows):
        batch = make_batch(random, x)
        weight, bias = random.uniform(0.5, 1.5, (2, *of_weights)).astype(np.float32)
        batch = batch._replace(weight=weight, bias=bias)
        y, dx = map(np.asarray, run(weight, bias, batch.x, batch.dy))
        assert y.dtype == dx.dtype == x.dtype
        right = ALONE[name][2](batch._replace(x=batch.x.astype(np.longdouble)))
        errors = exact.errors(batch, right, Answer(y, None, dx, None, None))
        assert errors.y <= BOUNDS["y"]
        assert errors.dx <= BOUNDS["dx"]
