"""Tests `implementation="device_invariant"` on one device; on several: over_devices.py."""

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise import invariant
from tests.helpers import bits, call, make, same
from tests.layers.accuracy import check, far_from_zero, make_batch, seeds, with_outlier

from .derivatives import (
    assert_agree,
    definition,
    ensemble_of_gradients,
    gradient_of_gradient,
    linearized,
    ours,
    slope_of_gradient,
)

MODE = "device_invariant"


@pytest.mark.parametrize("shape", [(7, 8), (64, 8), (16, 4, 7, 7), (1000, 2, 31)], ids=str)
@hypothesis.given(seeds)
@hypothesis.settings(max_examples=4)
def test_as_exact_as_the_normal_mode(shape, seed):
    random = np.random.default_rng(seed)
    for x in (far_from_zero(random, shape), with_outlier(random, shape, 0)):
        check(make_batch(random, x), implementation=MODE)


@pytest.mark.parametrize("constant", [0.1, -65504.0, 1e20])
def test_a_constant_channel_is_its_bias(constant):
    layer, state = make(2, "batch", approach="batch", implementation=MODE)
    layer = eqx.tree_at(lambda m: m.bias, layer, jnp.array([0.3, -7.0]))
    y, state = call(layer, state, jnp.full((14, 2, 5), constant, jnp.float32))
    assert bits(y) == bits(jnp.broadcast_to(layer.bias[:, None], y.shape))
    assert bits(state.get(layer.memory_index).variance) == bits(jnp.zeros(2))


def test_products_are_rounded_before_they_are_added():
    a, b = np.random.default_rng(0).standard_normal((2, 4096)).astype(np.float32)

    def remainder(a, b, c):
        return a * b - c

    fused = jax.jit(remainder)(a, b, a * b)
    rounded = jax.jit(invariant.rounded(remainder))(a, b, a * b)
    assert not np.asarray(rounded).any()
    if jax.default_backend() == "cpu":
        assert np.asarray(fused).any(), "nothing to prevent any more"


def test_roots_and_quotients_stay_what_they_are():
    def f(x, n):
        return x / 7, n / jnp.sqrt(x), jax.lax.rsqrt(x)

    x = np.linspace(0.1, 3, 64, dtype=np.float32)
    program = jax.jit(invariant.rounded(f)).lower(x, x).compile()
    assert " rsqrt(" not in str(program.as_text())
    right = x / np.float32(7), x / np.sqrt(x), 1 / np.sqrt(x)
    assert same(program(x, x), right)


@pytest.mark.parametrize(
    ("arguments", "x", "words"),
    [
        ({"activation": eqx.nn.PReLU(0.2)}, jnp.ones((4, 2)), "has arrays of its own"),
        ({"dtype": jnp.complex64}, jnp.ones((4, 2), jnp.complex64), "is for real input"),
    ],
    ids=["activation", "complex"],
)
def test_what_cannot_be_promised_is_an_error(arguments, x, words):
    layer, state = make(2, "batch", approach="batch", implementation=MODE, **arguments)
    with pytest.raises(ValueError, match=words):
        call(layer, state, x)


def test_derivatives_are_right():
    """Tests also those of which no bits are promised: of other orders, and forward."""
    transforms = linearized, ensemble_of_gradients, slope_of_gradient, gradient_of_gradient
    with jax.enable_x64(True):
        f = ours("batch", jnp.tanh, implementation=MODE)
    assert_agree(transforms, f, definition("batch", jnp.tanh), tolerance=1e-8)
