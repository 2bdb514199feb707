"""Tests that LayerNorm is a drop-in for eqx.nn.LayerNorm, and its derivatives.

What it keeps for the backward pass: tests/operation/test_residuals.py; any activation:
test_activations.py there; accuracy, dtypes, errors: in the files of those names here; in files,
beside a state and with a mask: test_other_norms.py.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm
from tests.compiling import filter_jit, jit
from tests.helpers import make, normal, over_batch


def moved(layer):
    """Returns the layer with another weight and bias, by the shapes of those it has."""
    leaves, structure = jax.tree.flatten(layer)
    leaves = [
        leaf + (0.3 * normal(seed, leaf.shape)).astype(leaf.dtype)
        for seed, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, leaves)


@filter_jit
def differentiate(layer, x, dy):
    """Returns y, and the gradients of sum(y * dy) in (layer, x)."""

    def f(layer_and_x):
        layer, x = layer_and_x
        y = jax.vmap(layer)(x)
        return jnp.sum(y * dy), y

    gradients, y = eqx.filter_grad(f, has_aux=True)((layer, x))
    return y, gradients


@pytest.mark.parametrize(
    ("shape", "weight", "bias"),
    [
        *((shape, True, True) for shape in [(6,), (2, 3, 2), (1,), ()]),
        *(((3, 4), *affine) for affine in [(True, False), (False, True), (False, False)]),
    ],
)
def test_as_equinox(shape, weight, bias):
    """By position, the arguments are Equinox's, and so is the type."""
    ours, theirs = (
        moved(layer(shape, 1e-3, weight, bias)) for layer in (LayerNorm, eqx.nn.LayerNorm)
    )
    assert isinstance(ours, eqx.nn.LayerNorm)
    x, dy = normal(2, (5, *shape), 1.0, 2.0), normal(3, (5, *shape))
    y, gradients = differentiate(ours, x, dy)
    right, right_gradients = differentiate(theirs, x, dy)
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)
    leaves, right_leaves = map(jax.tree.leaves, (gradients, right_gradients))
    assert len(leaves) == 1 + weight + bias
    for gradient, right_gradient in zip(leaves, right_leaves, strict=True):
        np.testing.assert_allclose(gradient, right_gradient, rtol=1e-4, atol=1e-5)


def test_the_moments_of_a_row_are_computed_by_one_loop():
    """XLA:CPU's sums over rows are not vectorised where they compute the moments again.

    Seen by the rounding of the mean, of which there is one.
    """

    def gradients(layer, x, dy):
        return jax.vjp(lambda layer, x: jax.vmap(layer)(x), layer, x)[1](dy)

    x = normal(0, (32, 64))
    compiled = jax.jit(gradients).lower(LayerNorm(64), x, x).compile()
    assert str(compiled.as_text()).count(" reduce-precision(") == 1


@pytest.mark.parametrize("axes", [(0, None), (None, 0)], ids=["weights", "biases"])
def test_only_weights_or_only_biases_differ(axes):
    """Each gets the gradients of the examples that share it."""
    weight, bias, x = (normal(seed, (3, 4), 1.0) for seed in range(3))
    given = [v if axis == 0 else v[0] for v, axis in zip((weight, bias), axes, strict=True)]

    def gradients(kind):
        def f(weight, bias, x):
            return eqx.tree_at(lambda m: (m.weight, m.bias), kind(4), (weight, bias))(x)

        loss = lambda *a: jnp.sum(jax.vmap(f, (*axes, 0))(*a) ** 2)  # noqa: E731
        return jit(jax.grad(loss, (0, 1)))(*given, x)

    for found, right in zip(gradients(LayerNorm), gradients(eqx.nn.LayerNorm), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.x32  # Equinox's layer promotes
def test_complex_numbers():
    x = normal(0, (5, 6), 1.0) + 1j * normal(1, (5, 6), -2.0, 3.0)
    layers = (kind(6, dtype=jnp.complex64) for kind in (LayerNorm, eqx.nn.LayerNorm))
    y, right = (jit(jax.vmap(layer))(x) for layer in layers)
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)


def test_its_shape():
    assert LayerNorm([3, 4]).shape == (3, 4)
    assert LayerNorm(3).shape == (3,)
    assert jax.tree.structure(LayerNorm(3)) == jax.tree.structure(LayerNorm((3,)))


class Tanh(eqx.Module):
    slope: jax.Array

    def __call__(self, u):
        return jnp.tanh(self.slope * u)


def definition(activation):
    def f(weight, bias, slope, x):
        u = (x - x.mean()) / jnp.sqrt(x.var() + 1e-5) * weight + bias
        return activation(slope)(u)

    return f


def ours(activation):
    def f(weight, bias, slope, x):
        layer = LayerNorm(4, activation=activation(slope))
        return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))(x)

    return f


EVERY = (0, 1, 2, 3)


def penalty(f):
    """Returns the gradient of the sum of squares of the gradient in x."""
    return jax.grad(
        lambda *a: jnp.sum(jax.grad(lambda *b: jnp.sum(f(*b) ** 2), 3)(*a) ** 2), EVERY
    )


def of_an_ensemble(f):
    several = jax.vmap(jax.jacrev(f, EVERY), in_axes=(None, None, None, 0))
    return lambda *a: several(*a[:3], jnp.stack([a[3], 2 * a[3], a[3] ** 2]))


@pytest.mark.x32  # in 64 bits anyway
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jacrev(f, EVERY),
        lambda f: jit(jax.hessian(lambda *a: f(*a).sum(), EVERY)),
        lambda f: jit(penalty(f)),
        lambda f: jit(jax.checkpoint(jax.jacrev(f, EVERY))),
        lambda f: jit(of_an_ensemble(f)),
    ],
    ids=["op by op", "hessian", "penalty", "remat", "ensemble"],
)
@pytest.mark.parametrize("activation", [Tanh, lambda _: jax.nn.silu], ids=["tanh", "silu"])
def test_derivatives(transform, activation):
    """Differentiates in weight, bias, a parameter of the activation, and x."""
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        given = [jnp.asarray(random.normal(size=n)) for n in (4, 4, (), 4)]
        right, found = (
            jax.tree.leaves(transform(f(activation))(*given)) for f in (definition, ours)
        )
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(4, 7), (6, 3, 5), (8, 64), (3, 2, 3, 4)])
def test_as_a_batch_norm_of_the_reshaped_input(shape):
    """OneFlow made its layer norm so: https://github.com/Oneflow-Inc/oneflow/issues/6149."""
    x = normal(0, shape, 3.0, 2.0)
    norm, state = make(len(x), "batch", approach="batch", channelwise_affine=False)
    channels = x.reshape(1, len(x), -1)  # the examples, in a batch of one
    right = jit(over_batch(norm))(channels, state)[0].reshape(shape)
    layer = LayerNorm(shape[1:], use_weight=False, use_bias=False)
    np.testing.assert_allclose(jit(jax.vmap(layer))(x), right, rtol=0, atol=1e-6)
