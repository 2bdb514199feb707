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


def exact(eps):
    """Returns y, dx, dweight and rstd of each channel, a row each, in extended precision."""
    x, dy = CHANNELS.astype(np.longdouble), COTANGENT.astype(np.longdouble)
    centred = x - x.mean(1, keepdims=True)
    rstd = 1 / np.sqrt((centred**2).mean(1, keepdims=True) + np.longdouble(np.float32(eps)))
    y = centred * rstd
    dx = rstd * (dy - dy.mean(1, keepdims=True) - y * (dy * y).mean(1, keepdims=True))
    return y, dx, (dy * y).sum(1), rstd


def check(y, dx, eps):
    right_y, right_dx, _, rstd = exact(eps)
    for result, right, bound in (
        (y, right_y, np.maximum(1, np.abs(right_y))),
        (dx, right_dx, rstd * np.abs(COTANGENT).max(1, keepdims=True)),
    ):
        errors = np.max(np.abs(np.asarray(result) - right) / bound, axis=1)
        errors = dict(zip([*SCALES, "constant"], errors, strict=True))
        assert not {scale: error for scale, error in errors.items() if not error <= 1e-6}


every_eps = pytest.mark.parametrize("eps", [1e-5, 1e-20])


@every_eps
def test_batch_norm(eps):
    layer, state = make(len(CHANNELS), "batch", approach="batch", eps=eps)
    y, _, (gradient, dx) = call_and_grad(layer, state, f32(CHANNELS.T), f32(COTANGENT.T))
    check(y.T, dx.T, eps)
    right = exact(eps)[2]
    # What rounding rstd costs is relative to the gradient.
    bound = 1e-7 * np.abs(COTANGENT).sum(1) + 4.3e-7 * np.abs(right)
    errors = (np.abs(np.asarray(gradient.weight) - right) / bound)[1:]
    assert np.all(errors <= 1), errors


@every_eps
def test_layer_norm(eps):
    y, pull_back = jax.vjp(jax.jit(jax.vmap(LayerNorm(N, eps=eps))), f32(CHANNELS))
    check(y, pull_back(f32(COTANGENT))[0], eps)


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
