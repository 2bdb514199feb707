"""An activation in the layer is as one after it, in its own derivatives as well."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .derivatives import ACTIVATIONS, COTANGENT, C, X, arrays, compiled, gradient, ours
from .helpers import bits, copy, make, over_batch


def scaled(scale, u):
    return scale * jax.nn.silu(u * scale)


class Scaled(eqx.Module):
    scale: jax.Array

    def __call__(self, u):
        return scaled(self.scale, u)


@pytest.mark.parametrize(
    "activation",
    [
        eqx.nn.PReLU(0.25),
        eqx.nn.PReLU(jnp.full((C, 1), 0.3)),
        Scaled(jnp.array(1.3)),
    ],
    ids=["prelu", "prelu of channels", "module"],
)
def test_the_parameters_of_an_activation(activation):
    inside, state = make(C, "batch", approach="batch", activation=activation)
    plain, _ = make(C, "batch", approach="batch")
    x = jnp.asarray(X, jnp.float32)

    def loss(y):
        return jnp.sum(jnp.sin(y) * COTANGENT.astype(np.float32))

    @eqx.filter_jit
    @eqx.filter_grad
    def ours(model):
        layer, x = model
        return loss(over_batch(layer)(x, copy(state))[0])

    @eqx.filter_jit
    @eqx.filter_grad
    def afterwards(model):
        layer, activation, x = model
        return loss(jax.vmap(activation)(over_batch(layer)(x, copy(state))[0]))

    layer, dx = ours((inside, x))
    right_layer, right_activation, right_dx = afterwards((plain, activation, x))
    result = layer.activation, layer.weight, layer.bias, dx
    right = right_activation, right_layer.weight, right_layer.bias, right_dx
    assert jax.tree.leaves(layer.activation)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_jit", [False, True], ids=["function", "jitted function"])
def test_an_activation_that_closes_over_what_is_differentiated(by_jit):
    x = jnp.asarray(X, jnp.float32)

    def loss(scale, inside):
        def function(u):
            return scaled(scale, u)

        function = jax.jit(function) if by_jit else function
        layer, state = make(
            C, "batch", approach="batch", activation=function if inside else None
        )
        y, _ = over_batch(layer)(x, state)
        return jnp.sum(jnp.sin(y if inside else function(y)))

    for derivative in (jax.grad, jax.jacfwd):
        derive = jax.jit(derivative(loss), static_argnums=1)
        np.testing.assert_allclose(derive(1.3, True), derive(1.3, False), rtol=1e-5)


@pytest.mark.parametrize("name", ["relu", "silu", "gelu"])
def test_an_activation_inside_is_the_same_as_afterwards(name):
    activation = ACTIVATIONS[name]
    (weight, bias, x), tangents = arrays(np.float32)
    inside = ours("batch", activation)
    plain = ours("batch", None)

    def afterwards(*primals):
        return activation(plain(*primals))

    y, right = (jax.jit(f)(weight, bias, x) for f in (inside, afterwards))
    np.testing.assert_allclose(y, right, rtol=1e-6, atol=1e-6)
    if name == "relu":
        assert bits(y) == bits(right)
    gradients, right = (
        compiled(gradient)(f, (weight, bias, x), tangents) for f in (inside, afterwards)
    )
    for a, b in zip(gradients, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [jnp.sum, lambda u: u[:1], lambda u: u.T, lambda u: jnp.stack([u, u])],
    ids=["scalar", "one channel", "transposed", "two"],
)
def test_an_activation_that_changes_the_shape(wrong):
    layer, state = make(C, "batch", approach="batch", activation=wrong)
    good, _ = make(C, "batch", approach="batch")

    def fail_then_succeed(x, state):
        with pytest.raises(ValueError, match="activation"):
            layer(x, state)
        return good(x, state)

    over_batch(fail_then_succeed)(jnp.asarray(X, jnp.float32), state)
