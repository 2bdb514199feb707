"""Tests that layers are exported with symbolic sizes, for all platforms, with gradients."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.jet import jet

from eqx_norm._normalise import jaxprs
from tests.compiling import jit
from tests.helpers import copy, make, normal, over_batch
from tests.layers.norms import made, mask_shape

N, C = 3, 6
PLATFORMS = "cpu", "cuda", "tpu"
# Symbolic shapes, and two that fit each. (The batch is symbolic only without a named axis:
# `lax.axis_size` fails for a symbolic size, and so does Equinox's BatchNorm.)
IMAGES, TOKENS = ((N, C, 5, 2), (N, C, 4, 7)), ((3, C, 5), (6, C, 5))
LAYERS = {
    "BatchNorm": (f"{N}, {C}, h, w", IMAGES),
    "BatchNorm, inference": (f"b, {C}, h, 2*h", ((2, C, 3, 6), (7, C, 1, 2))),
    "GroupNorm": (f"b, {C}, h, w", IMAGES),
    "InstanceNorm": (f"b, {C}, h, w", IMAGES),
    "LayerNorm": (f"b, {C}, 5", TOKENS),
    "RMSNorm": (f"b, {C}, 5", TOKENS),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "masked",
    [pytest.param(False, id="all"), pytest.param(True, id="masked", marks=pytest.mark.long)],
)
def test_export_with_symbolic_sizes(name, masked):
    symbols, shapes = LAYERS[name]
    name, _, mode = name.partition(", ")
    options = {"inference": True} if mode else {}
    layer, call = made(name, shapes[0][1:], activation=jax.nn.silu, **options)

    def f(*arrays):
        return call(layer, *arrays)[0]

    def derive(f, *arrays):
        return jax.value_and_grad(lambda x: jnp.sin(f(x, *arrays[1:])).sum())(arrays[0])

    shape = export.symbolic_shape(symbols)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    if masked:
        arguments.append(jax.ShapeDtypeStruct(mask_shape(name, shape), bool))
    exported = export.export(jax.jit(f), platforms=PLATFORMS)(*arguments)
    assert exported.vjp().platforms == PLATFORMS
    for sizes in shapes:
        arrays = [normal(0, sizes, 3)]
        if masked:
            mask = np.random.RandomState(0).random(mask_shape(name, sizes)) < 0.7
            arrays.append(jnp.asarray(mask))
        outputs, expected = (
            jit(derive, static_argnums=0)(g, *arrays) for g in (exported.call, f)
        )
        for actual, desired in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-5)


# --- Inference consists of primitives that exporters and `jet` know.

FIXED = (6, 4, 3, 5)
X = 3 + 2 * normal(0, FIXED)
ACTIVATIONS = {
    "none": None,
    "relu": jax.nn.relu,
    "prelu": eqx.nn.PReLU(0.25),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
}


def inference(activation, mask=None):
    """Returns a layer that has seen X once, mapped over a batch."""
    layer, state = make(FIXED[1], "batch", activation=activation, approach="batch")
    _, state = over_batch(layer)(X, state)
    layer = eqx.nn.inference_mode(layer)
    return jax.vmap(lambda x: layer(x, copy(state), mask=mask)[0])


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("mask", [None, jnp.arange(FIXED[-1]) < 4], ids=["all", "masked"])
def test_inference_consists_of_jax_primitives(activation, mask):
    closed = jax.make_jaxpr(inference(activation, mask))(X)
    names = {equation.primitive.name for equation in jaxprs.equations(closed.jaxpr)}
    assert not any(name.startswith("eqx_norm") for name in names)


def test_inference_taylor_series():
    """Tests tanh, because `jet` supports no `custom_jvp` such as ReLU."""
    call, dx = inference(jnp.tanh), normal(1, FIXED)

    def first(x):
        return jax.jvp(call, (x,), (dx,))

    expected = jit(lambda: jax.jvp(first, (X,), (dx,)))()
    outputs = jit(lambda: jet(call, (X,), ((dx, jnp.zeros_like(dx)),)))()
    for actual, desired in zip(outputs[1], (expected[0][1], expected[1][1]), strict=True):
        np.testing.assert_allclose(actual, desired, atol=5e-6)
