"""Tests that an activation in the layer equals the same function after the layer.

tests/layers/test_fuzz.py tests usual activations, test_derivatives.py derivatives of higher
order.
"""

import contextlib
import functools
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, GroupNorm, LayerNorm
from eqx_norm._normalise.formulas.activation import elementwise as in_shape
from tests.compiling import filter_jit
from tests.helpers import bits, copy, make, normal

N, C, L = 4, 2, 3
X, DY = normal(0, (N, C, L)), normal(1, (N, C, L))


@jax.custom_vjp
def straight_through(u):
    """Rounds, and passes the gradient on unchanged."""
    return jnp.round(u)


straight_through.defvjp(lambda u: (jnp.round(u), None), lambda _, g: (g,))


@jax.custom_jvp
def centred_derivative(u):
    return jnp.sin(u)


@centred_derivative.defjvp
def _(primals, tangents):
    (u,), (du,) = primals, tangents
    return jnp.sin(u), du - du.mean()


FUNCTIONS = {
    "relu": jax.nn.relu,
    # Depends on the shape: the layer must call it on an example, not on the batch or on rows.
    "softmax of channels": lambda u: jax.nn.softmax(u, axis=0),
    # Elementwise functions with results of another dtype, and one without forward derivative.
    "float64 constant": lambda u: u * np.sqrt(2),
    "bfloat16": lambda u: jax.nn.relu(u.astype(jnp.bfloat16)),
    "int": lambda u: jnp.floor(u).astype(jnp.int32),
    # Elementwise, with a derivative that is not.
    "centred derivative": centred_derivative,
    "straight-through of channels": lambda u: straight_through(jnp.cumsum(u, axis=0)),
    # An activation with parameters, which are differentiated as well.
    "prelu of channels": eqx.nn.PReLU(jnp.full((C, 1), 0.3)),
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
def test_activation_in_the_layer_equals_activation_after_the_layer(name):
    """Compares values, and gradients of x, weight, bias and the activation's parameters."""
    activation: Any = FUNCTIONS[name]
    mask, same = jnp.arange(L) < 2, eqx.nn.Identity()

    # Bits are of optimised programs.
    compiled = eqx.filter_jit if name == "relu" else filter_jit

    @compiled
    def results(batch_norm, layer_norm, after, x):
        def outputs(model):
            batch_norm, layer_norm, (after_batch_norm, after_layer_norm), x = model

            def one(x):
                y, _ = batch_norm(x, copy(state), mask=mask)
                return jnp.where(mask, after_batch_norm(y), 0), after_layer_norm(layer_norm(x))

            ys = jax.vmap(one, axis_name="batch")(x)
            return sum(jnp.vdot(jnp.sin(y), DY) for y in ys), ys

        gradient = eqx.filter_grad(outputs, has_aux=True)
        (*norms, after, dx), ys = gradient((batch_norm, layer_norm, after, x))
        pairs = zip(norms, after, strict=True)
        parameters = [(m.weight, m.bias, m.activation, function) for m, function in pairs]
        return ys, dx, jax.tree.leaves(parameters)

    with jax.enable_x64("float64" in name):
        plain, state = make(C, "batch", approach="batch")
        inside, _ = make(C, "batch", approach="batch", activation=activation)
        row_inside = LayerNorm((C, L), activation=activation)
        actual = results(inside, row_inside, (same, same), X)
        expected = results(plain, LayerNorm((C, L)), (AsFloat(activation),) * 2, X)
    if name == "relu":
        assert bits(actual[0]) == bits(expected[0])
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        # A number near a rounding boundary may be rounded to either side.
        tolerance = 1e-2 if name == "bfloat16" else 1e-5
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


ELEMENTWISE = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "silu": jax.nn.silu,
    "size": lambda u: u * u.shape[0],
    "size in a call": lambda u: jnp.where(u > 0, u, float(u.shape[0])),
    "size, filled in": lambda u: u * jnp.full_like(u, u.shape[0]),
}
OTHERS = {
    "maximum": lambda u: u / (1 + jnp.abs(u).max()),
    "cumsum": lambda u: jnp.cumsum(u, axis=0),
    "softmax": jax.nn.softmax,
    "position": lambda u: u * jnp.arange(1.0, 1 + u.shape[-1])[None],
    "NumPy's positions": lambda u: u * np.arange(u.size, dtype=np.float32).reshape(u.shape),
    "reversed pieces": lambda u: jnp.where(u > 0, u[::-1], u),
    "transposed": lambda u: jnp.where(u > 0, u.T.reshape(u.shape), u),
    "platform": lambda u: jax.lax.platform_dependent(u, cpu=jnp.tanh, default=jnp.sin),
    "function without forward derivative": straight_through,
}


@pytest.mark.x32  # the functions are of float32
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_are_computed_in_any_shape(name):
    """Compares values, and derivatives of first and second order."""
    u, function = normal(0, (3, 4)), ELEMENTWISE[name]
    in_rows = in_shape(function, u.shape, u.dtype)
    assert in_rows is not None

    def derivatives(function, u):
        def one(u):
            return jax.jvp(function, (u,), (jnp.ones_like(u),))[1]

        return function(u), one(u), jax.jvp(one, (u,), (u,))[1]

    expected = jax.jit(functools.partial(derivatives, function))(u)
    actual = jax.jit(functools.partial(derivatives, in_rows))(u.reshape(2, 6))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-6, atol=1e-7)


@pytest.mark.x32  # the functions are of float32
def test_elementwise_functions_are_recognised():
    """Tests functions also on a mesh, where traced programs name the sharding of arrays."""
    mesh = jax.sharding.AbstractMesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    for where in (contextlib.nullcontext(), jax.sharding.use_abstract_mesh(mesh)):
        with where:
            found = {
                name
                for name, function in (ELEMENTWISE | OTHERS).items()
                if in_shape(function, (3, 4), jnp.float32)
            }
            assert found == {*ELEMENTWISE}


@pytest.mark.parametrize(
    ("layer", "activation"),
    [(LayerNorm, jax.nn.hard_swish), (functools.partial(GroupNorm, 1), jax.nn.elu)],
)
def test_activation_on_a_mesh_of_one_device_with_explicit_axes(layer, activation):
    layer, x = layer(L, activation=activation), jnp.swapaxes(X, 1, 2)[..., 0]
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    expected = jax.vmap(layer)(x)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))
        y = jax.jit(jax.vmap(layer))(placed)
        gradient = jax.jit(jax.grad(lambda x: jax.vmap(layer)(x).sum()))
        for function in (jax.jit(jax.vmap(layer)), gradient):
            function.trace(placed).lower(lowering_platforms=("cuda", "tpu"))
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)


def test_numpy_activations_are_refused_by_constructors():
    """Prevents a second `jax.jit(numpy.tanh)`, which would end the process."""
    for layer in (LayerNorm, functools.partial(BatchNorm, axis_name="batch", approach="batch")):
        with pytest.raises(ValueError, match=r"activation=<ufunc 'tanh'>.*jax\.numpy\.tanh"):
            layer(3, activation=cast(Any, np.tanh))


@pytest.mark.x32  # float64 becomes float32
def test_activation_of_one_float64_numpy_example():
    layer, state = make(C, "batch", approach="batch", inference=True, activation=jax.nn.relu)
    x = np.random.default_rng(0).standard_normal((C, L))
    y, expected = (layer(array, state)[0] for array in (x, jnp.asarray(x)))
    assert bits(y) == bits(expected)
    assert y.dtype == LayerNorm((C, L))(x).dtype == jnp.float32
