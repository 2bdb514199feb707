"""Tests that layers are exported with symbolic sizes, for all platforms, with gradients."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.jet import jet

import eqx_norm
from eqx_norm._jax import jaxprs
from tests.compiling import jit
from tests.helpers import copy, make, normal
from tests.layers.norms import made, mask_shape

UNOPTIMISED = True  # compares values: tests/compiling.py

N, C = 3, 6
PLATFORMS = "cpu", "cuda", "tpu"
# Symbolic shapes, and one that fits each. (The batch is symbolic only without a named axis:
# `lax.axis_size` fails for a symbolic size, and so does Equinox's BatchNorm.)
LAYERS = {
    "BatchNorm": (f"{N}, {C}, h, w", (N, C, 4, 7)),
    "BatchNorm, inference": (f"b, {C}, h, 2*h", (2, C, 3, 6)),
    "GroupNorm": (f"b, {C}, h, w", (N, C, 4, 7)),
    "LayerNorm": (f"b, {C}, 5", (N, C, 5)),
    "RMSNorm": (f"b, {C}, 5", (N, C, 5)),
}


@pytest.mark.usefixtures("unchecked")  # jaxtyping broadcasts no symbols
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "masked",
    [pytest.param(False, id="all"), pytest.param(True, id="masked", marks=pytest.mark.long)],
)
def test_export_with_symbolic_sizes(name, masked):
    symbols, sizes = LAYERS[name]
    name, _, mode = name.partition(", ")
    options = {"inference": True} if mode else {}
    layer, call = made(name, sizes[1:], activation=jax.nn.silu, **options)

    def f(*arrays):
        return call(layer, *arrays)[0]

    def derive(f, *arrays):
        return jax.value_and_grad(lambda x: jnp.sin(f(x, *arrays[1:])).sum())(arrays[0])

    shape = export.symbolic_shape(symbols)
    like, arrays = [jax.ShapeDtypeStruct(shape, jnp.float32)], [normal(0, sizes, 3)]
    if masked:
        like.append(jax.ShapeDtypeStruct(mask_shape(name, shape), bool))
        arrays.append(normal(1, mask_shape(name, sizes)) < 0.7)
    exported = export.export(jax.jit(f), platforms=PLATFORMS)(*like)
    assert exported.vjp().platforms == PLATFORMS
    outputs, expected = (jit(derive, static_argnums=0)(g, *arrays) for g in (exported.call, f))
    chex.assert_trees_all_close(outputs, expected, rtol=1e-5, atol=1e-5)


def test_export_of_training_with_a_symbolic_batch_is_an_error_with_the_fix():
    layer, call = made("BatchNorm", (C, 5))
    like = jax.ShapeDtypeStruct(export.symbolic_shape(f"b, {C}, 5"), jnp.float32)
    with pytest.raises(ValueError, match=r"'batch' has no size.*inference_mode\(model\)"):
        export.export(jax.jit(lambda x: call(layer, x)[0]))(like)


# --- Inference consists of primitives that exporters and `jet` know.

X = normal(0, (6, 4, 3, 5))


def inference(activation, mask=None):
    """Returns a layer, mapped over a batch."""
    layer, state = make(4, "batch", activation=activation, approach="batch")
    layer = eqx.nn.inference_mode(layer)
    return jax.vmap(lambda x: layer(x, copy(state), mask=mask)[0])


@pytest.mark.parametrize("activation", [None, jax.nn.relu, eqx.nn.PReLU(0.25), jax.nn.softmax])
@pytest.mark.parametrize("mask", [None, jnp.arange(5) < 4], ids=["all", "masked"])
def test_inference_consists_of_jax_primitives(activation, mask):
    closed = jax.make_jaxpr(inference(activation, mask))(X)
    names = {equation.primitive.name for equation in jaxprs.equations(closed.jaxpr)}
    assert not any(name.startswith("eqx_norm") for name in names)


def test_inference_taylor_series():
    """Tests tanh, because `jet` supports no `custom_jvp` such as ReLU."""
    call, dx = inference(jnp.tanh), normal(1, X.shape)

    def first(x):
        return jax.jvp(call, (x,), (dx,))

    expected = jit(lambda: jax.jvp(first, (X,), (dx,)))()
    outputs = jit(lambda: jet(call, (X,), ((dx, jnp.zeros_like(dx)),)))()
    expected = [tangent for _, tangent in expected]
    chex.assert_trees_all_close(outputs[1], expected, rtol=1e-6, atol=5e-6)


@pytest.mark.usefixtures("unchecked")  # jaxtyping broadcasts no symbols
def test_moments_of_no_values_have_symbolic_sizes():
    (batch,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, 0), jnp.float32)
    exported = export.export(jax.jit(lambda x: eqx_norm.moments(x, 1).variance))(x)
    none = jnp.zeros((3, 0), jnp.float32)
    np.testing.assert_array_equal(exported.call(none), np.ones(3))
