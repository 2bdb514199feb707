"""Tests that LayerNorm is a drop-in for eqx.nn.LayerNorm, made of BatchNorm's operation.

What it keeps for the backward pass: tests/operation/test_residuals.py; any activation:
test_activations.py there; accuracy, errors: test_accuracy.py, test_errors.py here.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm
from tests.compiling import filter_jit, jit
from tests.helpers import bits, normal, over_batch

SHAPES = [(6,), (3, 4), (2, 3, 2), (1,), ()]
PARTLY = [(True, False), (False, True), (False, False)]


def both(shape, weight=True, bias=True, **more):
    """Returns this layer and Equinox's, with the same weight and bias."""
    kinds = {"use_weight": weight, "use_bias": bias}
    ours, theirs = LayerNorm(shape, **kinds, **more), eqx.nn.LayerNorm(shape, **kinds, **more)
    new = [
        None if old is None else old + 0.3 * normal(seed, old.shape).astype(old.dtype)
        for seed, old in enumerate((ours.weight, ours.bias))
    ]
    none = {"is_leaf": lambda leaf: leaf is None}
    return [eqx.tree_at(lambda m: (m.weight, m.bias), m, new, **none) for m in (ours, theirs)]


@filter_jit
def differentiate(layer, x, dy):
    def f(layer_and_x):
        layer, x = layer_and_x
        return jnp.sum(jax.vmap(layer)(x) * dy)

    return jax.vmap(layer)(x), eqx.filter_grad(f)((layer, x))


@pytest.mark.parametrize(
    ("shape", "weight", "bias"),
    [(shape, True, True) for shape in SHAPES] + [((3, 4), *affine) for affine in PARTLY],
)
def test_as_equinox(shape, weight, bias):
    ours, theirs = both(shape, weight, bias, eps=1e-3)
    x, dy = normal(2, (5, *shape), 1.0, 2.0), normal(3, (5, *shape))
    y, gradients = differentiate(ours, x, dy)
    y_theirs, gradients_theirs = differentiate(theirs, x, dy)
    np.testing.assert_allclose(y, y_theirs, rtol=1e-5, atol=1e-5)
    leaves, leaves_theirs = map(jax.tree.leaves, (gradients, gradients_theirs))
    assert len(leaves) == len(leaves_theirs) == 1 + weight + bias
    for gradient, gradient_theirs in zip(leaves, leaves_theirs, strict=True):
        np.testing.assert_allclose(gradient, gradient_theirs, rtol=1e-4, atol=1e-5)


def test_arguments_in_equinox_s_order():
    ours = LayerNorm((3, 4), 1e-3, False, True, jnp.bfloat16)
    theirs = eqx.nn.LayerNorm((3, 4), 1e-3, False, True, jnp.bfloat16)
    for name in ("shape", "eps", "use_weight", "use_bias"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.weight is None
    assert ours.bias is not None
    assert ours.bias.dtype == jnp.bfloat16
    assert isinstance(ours, eqx.nn.LayerNorm)
    assert LayerNorm([3, 4]).shape == LayerNorm((3, 4)).shape == (3, 4)
    assert LayerNorm(3).shape == (3,)
    assert jax.tree.structure(LayerNorm(3)) == jax.tree.structure(LayerNorm(3))


def test_a_state_is_passed_through():
    layer, x = LayerNorm(4), normal(0, (4,))
    model, state = eqx.nn.make_with_state(
        lambda: eqx.nn.Sequential([LayerNorm(4), BatchNorm(4, "batch", approach="batch")])
    )()
    y, after = layer(x, state)
    assert after is state
    assert bits(y) == bits(layer(x)) == bits(layer(x, key=jax.random.key(0)))
    assert jit(over_batch(model))(normal(0, (3, 4)), state)[0].shape == (3, 4)


def reference(weight, bias, slope, x):
    """Computes the definition in plain jax.numpy, for derivatives of all orders."""
    mean, variance = x.mean(), x.var()
    u = (x - mean) / jnp.sqrt(variance + 1e-5) * weight + bias
    return jnp.tanh(slope * u)


class Tanh(eqx.Module):
    slope: jax.Array

    def __call__(self, u):
        return jnp.tanh(self.slope * u)


def ours(weight, bias, slope, x):
    layer = LayerNorm(4, activation=Tanh(slope))
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))(x)


EVERY = (0, 1, 2, 3)


def penalty(f):
    """Returns the gradient of the sum of squares of the gradient in x."""
    return jax.grad(
        lambda *a: jnp.sum(jax.grad(lambda *b: jnp.sum(f(*b) ** 2), 3)(*a) ** 2), EVERY
    )


def of_an_ensemble(f):
    gradient = jax.grad(lambda *a: jnp.sum(f(*a) ** 2), EVERY)
    several = jax.vmap(gradient, in_axes=(None, None, None, 0))
    return lambda *a: several(*a[:3], jnp.stack([a[3], 2 * a[3], a[3] ** 2]))


@pytest.mark.x32  # in 64 bits anyway
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jacrev(f, EVERY),
        lambda f: jit(jax.jacfwd(f, EVERY)),
        lambda f: jit(jax.hessian(lambda *a: f(*a).sum(), EVERY)),
        lambda f: jit(penalty(f)),
        lambda f: jit(jax.checkpoint(jax.jacrev(f, EVERY))),
        lambda f: jit(of_an_ensemble(f)),
        lambda f: jit(lambda *a: jax.linearize(f, *a)[1](*a)),
    ],
    ids=["op by op", "jacfwd", "hessian", "penalty", "remat", "vmap of grad", "linearize"],
)
def test_derivatives(transform):
    """Differentiates in weight, bias, a parameter of the activation, and x."""
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        given = [jnp.asarray(random.normal(size=n)) for n in (4, 4, (), 4)]
        right, found = (jax.tree.leaves(transform(f)(*given)) for f in (reference, ours))
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_as_a_batch_norm_of_one_channel():
    """All of an example is one channel of a batch of one."""
    x = normal(0, (3, 4), 5.0)
    norm, state = eqx.nn.make_with_state(BatchNorm)(
        1, "batch", approach="batch", channelwise_affine=False
    )
    # Compiled, both: op by op, a division by a constant is rounded otherwise.
    y, _ = jax.jit(over_batch(norm))(x[None, None], state)
    plain = LayerNorm((3, 4), use_weight=False, use_bias=False)
    assert bits(y[0, 0]) == bits(plain(x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_in_and_out(dtype):
    x = normal(0, (5, 6), 1.0).astype(dtype)
    assert jax.vmap(LayerNorm(6))(x).dtype == dtype
    with jax.numpy_dtype_promotion("strict"):
        y, (gradients, dx) = differentiate(LayerNorm(6, dtype=dtype), x, x)
    assert y.dtype == dx.dtype == gradients.weight.dtype == dtype


@pytest.mark.x32  # Equinox's layer promotes
def test_complex_numbers():
    x = normal(0, (5, 6), 1.0) + 1j * normal(1, (5, 6), -2.0, 3.0)
    ours, theirs = LayerNorm(6, dtype=jnp.complex64), eqx.nn.LayerNorm(6, dtype=jnp.complex64)
    y, right = (jit(jax.vmap(layer))(x) for layer in (ours, theirs))
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)


def test_saved_by_this_layer_and_loaded_by_equinox_s(tmp_path):
    layer, _ = both((3, 4))
    eqx.tree_serialise_leaves(tmp_path / "layer", layer)
    for kind in (LayerNorm, eqx.nn.LayerNorm):
        again = eqx.tree_deserialise_leaves(tmp_path / "layer", kind((3, 4)))
        assert bits(again.weight) == bits(layer.weight)
        assert bits(again.bias) == bits(layer.bias)


def test_it_passes_through_jit_as_an_argument():
    layer = LayerNorm(4, activation=jax.nn.relu)
    x = normal(0, (4,))
    as_argument = jax.jit(lambda layer, x: layer(x))(layer, x)
    assert bits(as_argument) == bits(jax.jit(lambda x: layer(x))(x))
