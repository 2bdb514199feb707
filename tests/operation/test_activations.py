"""An activation in the layer is as one after it, in its own derivatives as well."""

import functools
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm
from tests.helpers import bits, copy, make, over_batch

from .derivatives import ACTIVATIONS, COTANGENT, C, X


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


@jax.custom_vjp
def straight_through(u):
    """Rounds, and hands the gradient on as if it had not."""
    return jnp.round(u)


straight_through.defvjp(lambda u: (jnp.round(u), None), lambda _, g: (g,))

# Each is given an example, and not the batch: so the layer must not call it on all of that.
COUPLED = {
    "maximum": lambda u: u / (1 + jnp.abs(u).max()),
    "cumsum": lambda u: jnp.cumsum(u, axis=0),
    "flip": jnp.flip,
    "softmax": jax.nn.softmax,
    "position": lambda u: u * jnp.arange(1.0, 1 + u.shape[-1]),
    "size": lambda u: u * u.shape[0],
    "size in a call": lambda u: jnp.where(u > 0, u, float(u.shape[0])),
    "size, filled in": lambda u: u * jnp.full_like(u, u.shape[0]),
    "NumPy's positions": lambda u: u * np.arange(u.size, dtype=np.float32).reshape(u.shape),
    "rank": lambda u: u if u.ndim == 2 else 2 * u,
    "reversed pieces": lambda u: jnp.where(u > 0, u[::-1], u),
}
# Elementwise; or the result is of another dtype, or has no forward derivative.
OTHERS = {
    **{name: function for name, function in ACTIVATIONS.items() if function is not None},
    "bfloat16": lambda u: jax.nn.relu(u.astype(jnp.bfloat16)),
    "float64 constant": lambda u: u * np.sqrt(2),
    "bool": lambda u: u > 0,
    "int": lambda u: jnp.floor(u).astype(jnp.int32),
    "straight-through": straight_through,
    "straight-through of channels": lambda u: straight_through(jnp.cumsum(u, axis=0)),
}


def as_float(activation):
    return lambda u: activation(u).astype(u.dtype)


@pytest.mark.parametrize("name", [*COUPLED, *OTHERS])
def test_any_function_that_keeps_the_shape_is_as_if_applied_to_the_output(name):
    activation = (COUPLED | OTHERS)[name]
    mask = jnp.asarray(np.arange(X.shape[-1]) < 2)

    def outputs(layer, row, afterwards, x):
        def of_batch_norm(x):
            y, _ = layer(x, copy(state), mask=mask)
            return y if afterwards is None else jnp.where(mask, afterwards(y), 0)

        y = jax.vmap(of_batch_norm, axis_name="batch")(x)
        z = jax.vmap(row)(x)
        return y, z if afterwards is None else jax.vmap(afterwards)(z)

    @eqx.filter_jit
    def gradient(layer, row, afterwards, x):
        def loss(x):
            out = outputs(layer, row, afterwards, x)
            dy = COTANGENT.astype(np.float32)
            return sum(jnp.sum(jnp.sin(y) * dy) for y in out), out

        return jax.grad(loss, has_aux=True)(x)

    with jax.enable_x64("float64" in name):
        x = jnp.asarray(X, jnp.float32)
        plain, state = make(C, "batch", approach="batch")
        fused, _ = make(C, "batch", approach="batch", activation=activation)
        rows = (LayerNorm(X.shape[1:], activation=f) for f in (activation, None))
        ours = gradient(fused, next(rows), None, x)
        right = gradient(plain, next(rows), as_float(activation), x)
    if name == "relu":
        assert bits(ours[1]) == bits(right[1])
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
        # A number next to a boundary may be rounded to either side.
        tolerance = 1e-2 if name == "bfloat16" else 1e-5
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_numpy_s_functions_are_refused_at_once():
    """A second `jax.jit(numpy.tanh)` ends the process."""
    for layer in (LayerNorm, functools.partial(BatchNorm, axis_name="batch", approach="batch")):
        with pytest.raises(ValueError, match=r"activation=<ufunc 'tanh'>.*jax\.numpy\.tanh"):
            layer(3, activation=cast(Any, np.tanh))


def test_one_example_of_numpy_s_float64():
    layer, state = make(C, "batch", approach="batch", inference=True, activation=jax.nn.relu)
    y, _ = layer(X[0], state)
    right, _ = layer(jnp.asarray(X[0]), state)
    assert bits(y) == bits(right)
    assert y.dtype == LayerNorm(X.shape[1:])(X[0]).dtype == jnp.float32
