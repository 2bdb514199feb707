"""Tests that `implementation="device_invariant"` gives one result on any number of devices."""

import json
import operator

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from eqx_norm import BatchNorm
from eqx_norm._normalise import invariant
from eqx_norm.strategies import Moments
from tests.compiling import jit
from tests.helpers import bits, call, make
from tests.layers.accuracy import check, far_from_zero, make_batch, seeds, with_outlier
from tests.processes import on_devices

from .over_devices import CASES, QUANTITIES

MODE = "device_invariant"


@pytest.fixture(scope="module")
def found():
    return json.loads(on_devices(8, "-m", "tests.operation.over_devices").stdout)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("name", CASES)
def test_same_bits_on_1_2_4_and_8_devices(found, name, quantity):
    ways = found[name][quantity]
    assert len(set(ways.values())) == 1, ways


def test_the_normal_mode_does_not_promise_it(found):
    """Guards the tests above, which might pass for other reasons."""
    ways = found["of the normal mode"]
    assert any(len(set(ways[quantity].values())) > 1 for quantity in ("y", "dx", "memory"))


def test_three_devices_hold_no_branches(found):
    error = found["error"]["three devices"]["3"]
    assert "'devices' has 3 devices" in error
    assert "implementation='auto' works with any" in error


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

    x = jnp.linspace(0.1, 3, 64)
    program = str(jax.jit(invariant.rounded(f)).lower(x, x).compile().as_text())
    assert " divide(" in program
    assert " rsqrt(" not in program
    found = jax.jit(invariant.rounded(f))(x, x)
    host = np.asarray(x)
    right = host / np.float32(7), host / np.sqrt(host), 1 / np.sqrt(host)
    for a, b in zip(found, right, strict=True):
        assert bits(a) == bits(b)


def test_derivatives_of_what_is_rounded():
    def f(x, y):
        z = x * y / (1 + y**2) + jax.lax.rsqrt(x) * 3 - jnp.square(y) ** 3 * jax.nn.silu(x)
        return z * x[:, :1]

    x, y = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, (2, 3, 4)), jnp.float32)
    rounded = jax.jit(invariant.rounded(f))
    np.testing.assert_allclose(rounded(x, y), f(x, y), rtol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(rounded, (1, None))(x[:, None], y), [f(x, y)], rtol=1e-6
    )
    check_grads(rounded, (x, y), 2, atol=1e-2, rtol=1e-2)
    gradients = jit(jax.grad(lambda *a: rounded(*a).sum(), (0, 1)))(x, y)
    right = jit(jax.grad(lambda *a: f(*a).sum(), (0, 1)))(x, y)
    for ours, theirs in zip(gradients, right, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    scaled = jax.grad(lambda s: invariant.rounded(operator.mul)(s, x[0]).sum())(jnp.float32(2))
    np.testing.assert_allclose(scaled, x[0].sum(), rtol=1e-6)


def test_a_rounded_function_keeps_pytrees():
    a = Moments(jnp.ones(()), jnp.arange(3.0), jnp.ones(3), ddof=1)
    merged = jax.jit(lambda a: invariant.rounded(Moments.merge)(a, a))(a)
    assert merged.ddof == 1
    assert bits(merged.mean) == bits(a.mean)


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


def test_other_derivatives_are_right():
    """Tests forward mode and a higher order, of which no bits are promised."""
    x, dx = np.random.default_rng(0).standard_normal((2, 8, 3, 4)).astype(np.float32)

    def hessian_of(implementation):
        layer, state = eqx.nn.make_with_state(BatchNorm)(
            3, "batch", approach="batch", activation=jnp.tanh, implementation=implementation
        )

        def f(x):
            over = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            return (over(x, state)[0] ** 3).sum()

        return jit(lambda x, dx: jax.jvp(jax.grad(f), (x,), (dx,)))(x, dx)

    for ours, theirs in zip(hessian_of(MODE), hessian_of("auto"), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
