"""Tests that an activation in the layer is as one after it, in its derivatives as well."""

import functools
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm
from tests.compiling import jit
from tests.helpers import bits, copy, make, over_batch

from .derivatives import ACTIVATIONS, COTANGENT, C, X


class Scaled(eqx.Module):
    scale: jax.Array

    def __call__(self, u):
        return self.scale * jax.nn.silu(u * self.scale)


@pytest.mark.parametrize("by_jit", [False, True], ids=["function", "jitted function"])
def test_an_activation_that_closes_over_what_is_differentiated(by_jit):
    x = jnp.asarray(X, jnp.float32)

    def loss(scale, inside):
        def function(u):
            return Scaled(scale)(u)

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
    with pytest.raises(ValueError, match="activation"):
        over_batch(layer)(jnp.asarray(X, jnp.float32), state)


@jax.custom_vjp
def straight_through(u):
    """Rounds, and hands the gradient on as if it had not."""
    return jnp.round(u)


straight_through.defvjp(lambda u: (jnp.round(u), None), lambda _, g: (g,))

FUNCTIONS = {
    **{name: function for name, function in ACTIVATIONS.items() if function is not None},
    # Each is given an example, and not the batch: so the layer must not call it on all of that.
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
    # Elementwise; or the result is of another dtype, or has no forward derivative.
    "bfloat16": lambda u: jax.nn.relu(u.astype(jnp.bfloat16)),
    "float64 constant": lambda u: u * np.sqrt(2),
    "bool": lambda u: u > 0,
    "int": lambda u: jnp.floor(u).astype(jnp.int32),
    "straight-through": straight_through,
    "straight-through of channels": lambda u: straight_through(jnp.cumsum(u, axis=0)),
    # What is differentiated as well.
    "prelu": eqx.nn.PReLU(0.25),
    "prelu of channels": eqx.nn.PReLU(jnp.full((C, 1), 0.3)),
    "module": Scaled(jnp.array(1.3)),
}


class AsFloat(eqx.Module):
    """Returns an activation's result in the dtype of its input, as a layer does."""

    activation: Any

    def __call__(self, u):
        return self.activation(u).astype(u.dtype)


# A product with a float64 constant is an error under strict promotion.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.x32 if "float64" in name else ())
        for name in FUNCTIONS
    ],
)
def test_any_function_that_keeps_the_shape_is_as_if_applied_to_the_output(name):
    """Compares values, and gradients of x, weight, bias and its own parameters."""
    activation: Any = FUNCTIONS[name]
    mask = jnp.asarray(np.arange(X.shape[-1]) < 2)

    @eqx.filter_jit
    def gradient(layer, row, afterwards, x):
        def loss(model):
            layer, row, (of_layer, of_row), x = model

            def of_batch_norm(x):
                y, _ = layer(x, copy(state), mask=mask)
                return y if of_layer is None else jnp.where(mask, of_layer(y), 0)

            y, z = jax.vmap(of_batch_norm, axis_name="batch")(x), jax.vmap(row)(x)
            out = y, z if of_row is None else jax.vmap(of_row)(z)
            dy = COTANGENT.astype(np.float32)
            return sum(jnp.sum(jnp.sin(y) * dy) for y in out), out

        return eqx.filter_grad(loss, has_aux=True)((layer, row, afterwards, x))

    with jax.enable_x64("float64" in name):
        x = jnp.asarray(X, jnp.float32)
        plain, state = make(C, "batch", approach="batch")
        fused, _ = make(C, "batch", approach="batch", activation=activation)
        row, plain_row = (LayerNorm(X.shape[1:], activation=f) for f in (activation, None))
        ours, out = gradient(fused, row, (None, None), x)
        right, right_out = gradient(plain, plain_row, (AsFloat(activation),) * 2, x)
    if name == "relu":
        assert bits(out) == bits(right_out)
    (layer, row, _, dx), (plain, plain_row, own, right_dx) = ours, right
    vectors = [(f.weight, f.bias) for f in (layer, row, plain, plain_row)]
    ours = out, dx, vectors[:2], layer.activation, row.activation
    right = right_out, right_dx, vectors[2:], *own
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
        # A number next to a boundary may be rounded to either side.
        tolerance = 1e-2 if name == "bfloat16" else 1e-5
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_numpy_s_functions_are_refused_at_once():
    """Guards from a second `jax.jit(numpy.tanh)`, which ends the process."""
    for layer in (LayerNorm, functools.partial(BatchNorm, axis_name="batch", approach="batch")):
        with pytest.raises(ValueError, match=r"activation=<ufunc 'tanh'>.*jax\.numpy\.tanh"):
            layer(3, activation=cast(Any, np.tanh))


@pytest.mark.x32  # where float64 becomes float32
def test_one_example_of_numpy_s_float64():
    layer, state = make(C, "batch", approach="batch", inference=True, activation=jax.nn.relu)
    y, _ = layer(X[0], state)
    right, _ = layer(jnp.asarray(X[0]), state)
    assert bits(y) == bits(right)
    assert y.dtype == LayerNorm(X.shape[1:])(X[0]).dtype == jnp.float32


BRANCHES = {
    "on a mapped value": lambda i: lambda u: jax.lax.switch(i, [jnp.tanh, jax.nn.relu], u),
    "on a sum": lambda _: lambda u: jax.lax.cond(u.sum() > 0, jnp.tanh, jnp.sin, u),
    "on the platform": lambda _: (
        lambda u: jax.lax.platform_dependent(u, cpu=jnp.tanh, default=jnp.sin)
    ),
}


@pytest.mark.parametrize("branch", BRANCHES.values(), ids=BRANCHES)
def test_an_activation_that_branches(branch):
    """Compares the gradients of x and their derivatives with those of the branch afterwards."""
    x, which = jnp.asarray(X, jnp.float32), jnp.arange(len(X)) % 2

    def gradient(x, inside):
        def one(x, i):
            activation = branch(i)
            row = LayerNorm(X.shape[1:], activation=activation if inside else None)
            return row(x) if inside else activation(row(x))

        return jax.grad(lambda x: jnp.sin(jax.vmap(one)(x, which)).sum())(x)

    def second(x, inside):
        dy = jnp.asarray(COTANGENT, x.dtype)
        return jax.grad(lambda x: jnp.vdot(gradient(x, inside), dy))(x)

    for derive in (gradient, second):
        derive = jit(derive, static_argnums=1)
        np.testing.assert_allclose(derive(x, True), derive(x, False), rtol=1e-4, atol=1e-5)
