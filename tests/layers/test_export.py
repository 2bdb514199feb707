"""Tests that layers are exported with symbolic sizes, for all platforms, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tests.compiling import jit
from tests.helpers import normal
from tests.layers.norms import made

N, C = 3, 6
PLATFORMS = "cpu", "cuda", "tpu"
# Symbolic shapes, and two that fit each. (JAX cannot name an axis of symbolic size,
# `lax.axis_size` of it fails, and so does Equinox's BatchNorm: `b` only without a named axis.)
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
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_symbolic_sizes(name, masked):
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
        arguments.append(jax.ShapeDtypeStruct((shape[0], *shape[2:]), bool))
    exported = export.export(jax.jit(f), platforms=PLATFORMS)(*arguments)
    assert exported.vjp().platforms == PLATFORMS
    for n, channels, *spatial in shapes:
        arrays = [normal(0, (n, channels, *spatial), 3)]
        if masked:
            arrays.append(jnp.asarray(np.random.RandomState(0).random((n, *spatial)) < 0.7))
        outputs, expected = (
            jit(derive, static_argnums=0)(g, *arrays) for g in (exported.call, f)
        )
        for actual, desired in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-5)
