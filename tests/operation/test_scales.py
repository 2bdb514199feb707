"""Compares gradients at any scale, and with any eps, with extended precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm
from tests.helpers import call_and_grad, f32, make

N = 32
# Of each scale a channel, or a row; and a constant one.
SCALES = 10.0 ** np.arange(-18, 19, 3)
RANDOM = np.random.default_rng(0)
UNIT = np.append(RANDOM.standard_normal((len(SCALES), N)), np.zeros((1, N)), axis=0)
CHANNELS = (UNIT * np.append(SCALES, 1)[:, None]).astype(np.float32)
CHANNELS[-1] = 0.7
# In part along y, so that what the variance adds to dx is as large as dx.
COTANGENT = (UNIT + RANDOM.standard_normal(UNIT.shape)).astype(np.float32)


def batch_norm(eps):
    layer, state = make(len(CHANNELS), "batch", approach="batch", eps=eps)
    y, _, (gradient, dx) = call_and_grad(layer, state, f32(CHANNELS.T), f32(COTANGENT.T))
    return y.T, dx.T, gradient.weight


def layer_norm(eps):
    y, pull_back = jax.vjp(jax.jit(jax.vmap(LayerNorm(N, eps=eps))), f32(CHANNELS))
    return y, pull_back(f32(COTANGENT))[0], None


@pytest.mark.parametrize("layer", [batch_norm, layer_norm])
@pytest.mark.parametrize("eps", [1e-5, 1e-20])
def test_gradients(layer, eps):
    x, dy = CHANNELS.astype(np.longdouble), COTANGENT.astype(np.longdouble)
    centred = x - x.mean(1, keepdims=True)
    rstd = 1 / np.sqrt((centred**2).mean(1, keepdims=True) + np.longdouble(np.float32(eps)))
    y = centred * rstd
    dx = rstd * (dy - dy.mean(1, keepdims=True) - y * (dy * y).mean(1, keepdims=True))
    dweight, sum_dy = (dy * y).sum(1), np.abs(dy).sum(1)
    bounds = (
        np.maximum(1, np.abs(y)),
        rstd * np.abs(dy).max(1, keepdims=True),
        0.1 * sum_dy + 0.43 * np.abs(dweight),  # rounding rstd costs a part of dweight
    )
    for actual, expected, bound in zip(layer(eps), (y, dx, dweight), bounds, strict=True):
        if actual is not None:
            errors = np.abs(np.asarray(actual) - expected) / bound
            errors = errors.reshape(len(SCALES) + 1, -1).max(1)
            by_scale = dict(zip([*SCALES, "constant"], errors, strict=True))
            assert not {scale: e for scale, e in by_scale.items() if not e <= 1e-6}


def test_the_second_derivative_of_a_large_variance():
    """Fails if a quotient by the variance is 0, and with it the rest of the product."""
    _, state = make(1, "batch", approach="batch")
    layer, _ = make(1, "batch", approach="batch", channelwise_affine=False)
    x, dx, dy = (RANDOM.standard_normal((N, 1)) for _ in range(3))

    @jax.jit
    def slope_of_gradient(x, dx, dy):
        def gradient(x):
            y = jax.vmap(lambda x: layer(x, state)[0], axis_name="batch")
            return jax.vjp(y, x)[1](dy)[0]

        return jax.jvp(gradient, (x,), (dx,))[1]

    # Along a direction of the same scale it is as much smaller as x is larger.
    large = slope_of_gradient(f32(x * 2.0**44), f32(dx * 2.0**44), f32(dy))
    small = slope_of_gradient(f32(x * 2.0**20), f32(dx * 2.0**20), f32(dy))
    assert jnp.abs(small).min() > 0
    np.testing.assert_array_equal(large * 2.0**24, small)
