"""Tests that layers are exported with symbolic sizes, for all platforms, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from eqx_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from tests.compiling import jit
from tests.helpers import copy, make, normal

N, C = 3, 4
PLATFORMS = "cpu", "cuda", "tpu"


def batch_norm():
    layer, state = make(C, "batch", approach="batch", activation=jax.nn.silu)

    def one(x, mask=None):
        return layer(x, copy(state), mask=mask)[0]

    return lambda *arrays: jax.vmap(one, axis_name="batch")(*arrays)


def of_each(layer):
    return lambda *arrays: jax.vmap(lambda x, mask=None: layer(x, mask=mask))(*arrays)


# How a batch is normalised, its symbolic shape, and two that fit it. (JAX cannot name an axis
# of symbolic size, `lax.axis_size` of it fails, and so does Equinox's BatchNorm.)
IMAGES, TOKENS = ((N, C, 5, 2), (N, C, 4, 7)), ((3, C, 5), (6, C, 5))
LAYERS = {
    "BatchNorm": (batch_norm, f"{N}, {C}, h, w", IMAGES),
    "GroupNorm": (lambda: of_each(GroupNorm(2, C)), f"b, {C}, h, w", IMAGES),
    "InstanceNorm": (lambda: of_each(InstanceNorm(C, affine=True)), f"b, {C}, h, w", IMAGES),
    "LayerNorm": (lambda: of_each(LayerNorm((C, 5))), f"b, {C}, 5", TOKENS),
    "RMSNorm": (lambda: of_each(RMSNorm((C, 5))), f"b, {C}, 5", TOKENS),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_symbolic_sizes(name, masked):
    make_layer, symbols, shapes = LAYERS[name]
    layer, shape = make_layer(), export.symbolic_shape(symbols)

    def gradient(f, *arrays):
        return jax.value_and_grad(lambda x: jnp.sin(f(x, *arrays[1:])).sum())(arrays[0])

    given = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    if masked:
        given.append(jax.ShapeDtypeStruct((shape[0], *shape[2:]), bool))
    exported = export.export(jax.jit(layer), platforms=PLATFORMS)(*given)
    assert exported.vjp().platforms == PLATFORMS
    for n, channels, *spatial in shapes:
        arrays = [normal(0, (n, channels, *spatial), 3)]
        if masked:
            arrays.append(jnp.asarray(np.random.RandomState(0).random((n, *spatial)) < 0.7))
        derive = jit(gradient, static_argnums=0)
        ours, right = ((jit(f)(*arrays), derive(f, *arrays)) for f in (exported.call, layer))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
