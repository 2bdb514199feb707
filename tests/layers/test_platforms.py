"""Tests the programs that JAX lowers for GPUs and TPUs, on a machine without either.

Every layer is lowered for both, in each direction. test_accuracy.py checks the errors
of lowered programs; `make gpu-compile-check` and `make tpu-compile-check` count the bytes that
compiled programs read and write.
"""

import contextlib
import functools
import math
import re
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import eqx_norm
from eqx_norm import GroupNorm, LayerNorm, RMSNorm
from eqx_norm._normalise.variants.gpu_chain import FEW
from tests.compiling import jit, lowered_for
from tests.helpers import make, over_batch, y_and_gradients
from tests.layers.norms import (
    NAMES,
    each_example_norm,
    made,
    mask_shape,
    moved,
    over_examples,
    with_parameters,
)

pytestmark = pytest.mark.x32  # has its own dtypes

N, C, H, W = 2, 6, 3, 5
SHAPE = C, H, W
SILU = jax.nn.silu
close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)


def lower(forward, *point, platforms=("cuda", "tpu")):
    """Lowers y, the gradients in weights and x and in x alone, and the forward derivative,
    without implicit promotion; returns the program's text."""

    def every_direction(*point):
        def loss(*point):
            return jnp.sum(jnp.abs(forward(*point)) ** 2, dtype=float)

        gradients = [jax.grad(loss, argnums)(*point) for argnums in ((0, 1), 1)]
        return forward(*point), gradients, jax.jvp(forward, point, point)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        traced = jax.jit(every_direction).trace(*point)
        return traced.lower(lowering_platforms=platforms).as_text()


# The dtype of x; whether there is a mask; the devices over which `jit` splits x, unless there
# is one; the platforms.
BY_EACH_NORM = [
    ("float32", True, 1, ("cuda", "tpu")),
    ("complex64", True, 1, ("cuda", "tpu")),
    ("bfloat16", False, 1, ("cuda", "tpu")),
    ("bfloat16", True, 2, ("cuda",)),
]
BY_SOME = [
    ("bfloat16", False, 2, ("tpu",)),
    ("bfloat16", False, 4, ("cuda",)),
]
LOWERED = [
    *((name, *case) for name in NAMES for case in BY_EACH_NORM),
    # Statistics over a batch, of rows and of groups.
    *((name, *case) for name in ("BatchNorm", "LayerNorm", "GroupNorm") for case in BY_SOME),
]


@pytest.mark.parametrize(("name", "dtype", "masked", "devices", "platforms"), LOWERED)
def test_layers_are_lowered_for_gpus_and_tpus(name, dtype, masked, devices, platforms):
    """Tests that each GPU computes passes on its shard of x, and that XLA splits them for TPUs,
    and where the GPUs' shards would be uneven."""
    options = {"dtype": dtype} if dtype == "complex64" else {"activation": SILU}
    layer, call = made(name, SHAPE, **options)
    weights, static = eqx.partition(layer, eqx.is_inexact_array)
    mask = jnp.broadcast_to(jnp.arange(W) > 0, mask_shape(name, (N, *SHAPE)))
    mask = mask if masked else None

    def forward(weights, x):
        return call(eqx.combine(weights, static), x, mask)[0]

    with over_devices((N, *SHAPE), devices, dtype) as x:
        text = lower(forward, weights, x, platforms=platforms)
    assert ("@CustomSPMDPartitioning(" in text) == (devices == 2 and "cuda" in platforms)


@contextlib.contextmanager
def over_devices(shape, devices, dtype="float32"):
    """Yields an x for a program that `jit` splits, if there are several devices."""
    if devices == 1:
        yield jax.ShapeDtypeStruct(shape, dtype)
        return
    mesh = jax.sharding.AbstractMesh((devices,), ("x",), (AxisType.Auto,))
    where = jax.NamedSharding(mesh, jax.P("x" if shape[0] % devices == 0 else None))
    with jax.sharding.use_abstract_mesh(mesh):
        yield jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def halves(*shape):
    return jax.ShapeDtypeStruct((N, *shape), jnp.bfloat16)


def of_call(name):
    """Returns a norm with weight and bias of each example."""
    layer, call = made(name, SHAPE)
    weights = {"weight": halves(*layer.weight.shape), "bias": halves(*SHAPE)}
    return lambda weights, x: call(layer, x, **weights)[0], weights


def of_halves(axis):
    """Returns the two halves of a norm, with a mask for each value."""

    def halved(weight, x):
        mask, options = x > 0, {"axis": axis, "activation": SILU}
        moments = eqx_norm.moments(x, axis, mask=mask)
        return eqx_norm.normalise(x, moments, weight, weight, mask=mask, **options)

    return halved, jax.ShapeDtypeStruct((1, 1, H, 1), jnp.float32)


def inverse(weight, y):
    used = eqx_norm.moments(y, 1)
    return eqx_norm.denormalise(y, used, weight, weight, axis=1, mask=y > 0)


def remembered(weight, x):
    """Returns a running variance, whose derivatives pass through the memory of a layer."""
    norm, state = make(C, "batch", approach="ema", memory_axis_name="more")
    _, after = over_batch(over_batch(norm), "more")(weight.astype(x.dtype) * x[None], state)
    return norm.running(after).variance


def of_parts(weight, x):
    """Returns a norm of examples of which each is split along a mapped axis."""
    norm = GroupNorm(3, C, axis_name="part")
    norm = with_parameters(norm, weight, weight)
    return jax.vmap(lambda x: over_examples(norm, x), axis_name="part")(x[:, None])


NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
FUNCTIONS = {
    **{f"{name}, weights of a call": of_call(name) for name in NAMES},
    "halves of a batch norm": of_halves((0, 2, 3)),
    "halves of a layer norm": of_halves(1),
    "inverse": (inverse, jax.ShapeDtypeStruct((H, 1), jnp.float32)),
    "memory": (remembered, NUMBER),
    "parts": (of_parts, jax.ShapeDtypeStruct((C,), jnp.float32)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_lowered_for_gpus_and_tpus(name):
    function, weights = FUNCTIONS[name]
    lower(function, weights, halves(*SHAPE))


@pytest.mark.parametrize(
    ("kind", "shape"), [(LayerNorm, (C,)), (LayerNorm, SHAPE), (RMSNorm, (C, 7))]
)
def test_axis_0_norms_transpose_vectors_only(kind, shape):
    x = np.random.default_rng(0).standard_normal((N, *shape)).astype(np.float32)
    layer, rows = moved(kind(C, axis=0)), moved(kind(C))
    f = y_and_dx(layer)
    text = jax.jit(f).trace(x).lower(lowering_platforms=("cpu", "cuda", "tpu")).as_text()
    for sizes in re.findall(r"stablehlo.transpose .* -> tensor<([\dx]+)xf32>", text):
        assert np.prod([*map(int, sizes.split("x"))]) < x.size  # vectors only
    for _ in shape[1:]:
        rows = jax.vmap(rows, 1, 1)
    close(jit(f)(x), jit(y_and_dx(rows))(x))


def y_and_dx(layer):
    def f(x, dy=None):
        of_x = functools.partial(over_examples, layer)
        return y_and_gradients(of_x, x if dy is None else dy, x)

    return f


def is_one_kernel(traced):
    """Returns whether a GPU program is the one kernel, with a maximum of each row."""
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return "applies stablehlo.maximum" in text


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("layer", [RMSNorm(W), GroupNorm(2, C, 1e-5, False)])
def test_one_kernel_over_devices(layer, kind):
    """Tests that `shard_map` lowers the one kernel for a GPU, and that `jit` leaves it to each
    device."""
    shape = SHAPE if isinstance(layer, GroupNorm) else (W,)
    mesh = jax.sharding.AbstractMesh((2,), ("x",), (kind,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    x = jax.ShapeDtypeStruct((N, *shape), jnp.float32, sharding=sharding)
    options: Any = {"mesh": mesh, "in_specs": jax.P("x"), "out_specs": jax.P("x")}
    programs = [y_and_dx(layer)]
    if kind == AxisType.Auto:
        for check in (True, False):
            programs.append(jax.shard_map(y_and_dx(layer), check_vma=check, **options))
    for program in programs:
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(program).trace(x)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert is_one_kernel(traced) != ("CustomSPMDPartitioning" in text)
            traced.lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("name", ["LayerNorm", "LayerNorm, axis=0", "GroupNorm"])
def test_one_kernel_without_gradients_of_weights(name):
    """Tests norms without gradients of weights, with an activation; not along the channels."""
    random = np.random.default_rng(0)
    x, dy = random.standard_normal((2, 4, 6, 5, 7)).astype(np.float32)
    layer, _ = made(name, x.shape[1:], activation=jax.nn.leaky_relu)
    f = y_and_dx(moved(layer))
    assert is_one_kernel(jax.jit(f).trace(x, dy)) == ("axis" not in name)
    close(jit(lowered_for("cuda", f))(x, dy), jit(f)(x, dy))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@each_example_norm
def test_y_has_one_form_with_a_gradient_and_without(name, platform):
    """Compares programs that return y alone, from which JAX drops the unused gradients."""
    layer, call = made(name, SHAPE, activation=SILU)
    weights, static = eqx.partition(layer, eqx.is_inexact_array)

    def forward(weights, x):
        return call(eqx.combine(weights, static), x)[0]

    def in_x(weights, x):
        return y_and_gradients(functools.partial(forward, weights), x, x)

    def in_all(weights, x):
        return y_and_gradients(forward, x, weights, x)

    def tangent(*point):
        return jax.jvp(forward, point, point)

    def form(f):
        text = jax.jit(f).trace(weights, halves(*SHAPE)).lower(lowering_platforms=(platform,))
        return text.as_text().partition("\n")[2]  # without the function's name

    for differentiated in (in_x, in_all, tangent):
        assert form(lambda *at, f=differentiated: f(*at)[0]) == form(forward)


@pytest.mark.parametrize("values", [FEW, FEW + 1])
def test_one_kernel_in_training_on_short_rows(values):
    """Tests short rows with gradients of weights, and with forward over reverse mode."""
    x = np.random.default_rng(0).standard_normal((4, 3 * values)).astype(np.float32)
    layer = moved(GroupNorm(3, 3 * values, activation=SILU))
    weights, static = eqx.partition(layer, eqx.is_inexact_array)

    def loss(weights, x):
        return jnp.sum(over_examples(eqx.combine(weights, static), x) ** 3)

    def f(*point):
        gradients = jax.grad(loss, (0, 1))
        return gradients(*point), jax.jvp(gradients, point, point)

    assert is_one_kernel(jax.jit(f).trace(weights, x)) == (values == FEW)
    close(jit(lowered_for("cuda", f))(weights, x), jit(f)(weights, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "barriers"),
    [
        # The two sums over all of x, of 11 parts of 24 rows, and none of the first sixteenth.
        ((264, 8), 2),
        ((263, 8), 0),
        ((160, 8), 0),
        # The first sixteenth alone.
        ((4800, 8), 1),
        # Images: all three, also those of the first of four rows of pixels.
        ((4, 8, 4, 32), 3),
        ((4, 8, 3, 8), 0),
    ],
)
def test_gpu_sums_few_rows_in_two_steps(shape, barriers):
    """Avoids that XLA writes the operand of such sums to memory; XLA splits longer sums."""
    layer, call = made("BatchNorm", shape[1:])
    traced = jax.jit(lambda x: call(layer, x)[0]).trace(jnp.zeros(shape))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("optimization_barrier") == barriers


@pytest.mark.parametrize(
    ("name", "shape", "platform", "devices"),
    [
        ("BatchNorm", (32, 4, 8, 8), "cuda", 1),
        ("BatchNorm", (8192, 8), "cuda", 1),
        ("BatchNorm", (8192, 8), "tpu", 1),
        ("BatchNorm", (8192, 8), "tpu", 4),
        ("BatchNorm", (64, 4, 8, 8), "tpu", 4),
        ("LayerNorm", (4, 384), "tpu", 1),  # a GPU's y of rows is one kernel
        ("LayerNorm", (4, 384), "tpu", 4),
    ],
)
def test_statistics_read_x_once_and_a_sixteenth_twice(name, shape, platform, devices):
    """Counts the sums over x - mean and its square, which XLA fuses, and those over a part, in
    rows of whole cache lines."""
    layer, call = made(name, shape[1:])
    with over_devices(shape, devices) as x:
        traced = jax.jit(lambda x: call(layer, x)[0]).trace(x)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    sums = re.findall(r"stablehlo\.reduce\(.*: \(tensor<([\dx]+)xf32>", text)
    sizes = [math.prod(map(int, of.split("x"))) for of in sums]
    whole = math.prod(shape)
    assert sizes.count(whole) == 2
    assert max(size for size in sizes if size != whole) <= whole / 12


@pytest.mark.parametrize(("length", "is_one"), [(1024, True), (900, True), (640, False)])
def test_one_kernel_with_a_costly_activation(length, is_one):
    """Tests that rows which a GPU's kernel would pad by more than a quarter take passes."""
    layer = LayerNorm(length, use_weight=False, use_bias=False, activation=jax.nn.gelu)
    assert is_one_kernel(jax.jit(y_and_dx(layer)).trace(jnp.zeros((2, length)))) == is_one
