"""Tests scale and shift of one call, `layer(x, weight=w, bias=b)`, and `weight_offset`.

tests/fuzz.py tests their values and gradients, test_errors.py their errors, test_platforms.py
programs for GPUs and TPUs.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm
from eqx_norm._jax import jaxprs
from tests.helpers import bits, normal, y_and_gradients
from tests.layers.norms import each_layout, made, with_parameters

N, SHAPE = 4, (6, 5, 7)


def drawn(name, full=()):
    """Returns x, dy, and a weight and bias for each example, of the shape of the layer's own;
    those whose name is in `full` have a number for each value of x."""
    random = np.random.default_rng(0)
    own = made(name, SHAPE)[0].weight.shape
    shapes = [SHAPE if argument in full else own for argument in ("weight", "bias")]
    x, *arrays = (random.standard_normal((N, *shape)) for shape in (SHAPE, SHAPE, *shapes))
    return [array.astype(np.float32) for array in (x + 10, *arrays)]


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("BatchNorm", ()),
        ("BatchNorm", ("bias",)),
        ("LayerNorm", ()),
        ("LayerNorm, axis=0", ()),
        ("GroupNorm", ("weight", "bias")),
    ],
)
def test_call_weights_in_half_precision_round_once(name, full):
    """Fails for a separate scale and shift in bfloat16, which round three times, and for a sum
    of weight and offset in bfloat16: https://github.com/NVIDIA/TransformerEngine/pull/1690."""
    arrays = [jnp.asarray(v, jnp.bfloat16) for v in drawn(name, full)]
    layer, call = made(name, SHAPE, weight_offset=1.0)
    y, expected = (
        call(layer, x, weight=weight, bias=bias)[0]
        for x, _, weight, bias in (arrays, [v.astype(jnp.float32) for v in arrays])
    )
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=2.0**-8, atol=1e-6)


@each_layout
def test_call_weights_replace_the_layer_s_own(name):
    """Tests weight, bias and both; the layer's own have no gradient, and need not exist."""
    x, dy, weight, bias = drawn(name)
    layer, call = made(name, SHAPE, activation=jax.nn.silu)
    layer = with_parameters(layer, layer.weight + 1, layer.bias + 2)
    bare, both = with_parameters(layer, None, None), {"weight": weight, "bias": bias}
    own = {key: jnp.broadcast_to(getattr(layer, key), both[key].shape) for key in both}
    for given in ({"weight": weight}, {"bias": bias}, both):
        y, _ = call(layer, x, **given)
        assert bits(y) == bits(call(bare, x, **own | given)[0])
    gradient = eqx.filter_grad(lambda layer: jnp.vdot(call(layer, x, **both)[0], dy))
    assert not any(np.any(v) for v in jax.tree.leaves(gradient(layer)))


@each_layout
def test_residuals_and_passes_with_call_weights(name):
    """Tests that x is the only residual of its size, and that gradients of one weight for each
    example need no more passes than gradients of a shared weight."""
    layer, call = made(name, SHAPE)
    x, dy, weight, bias = map(jnp.asarray, drawn(name))

    def of_each(x, weight, bias):
        return call(layer, x, weight=weight, bias=bias)[0]

    def of_all(x, weight, bias):
        return call(functools.partial(layer, weight=weight, bias=bias), x)[0]

    def passes(f, *arrays):
        traced = jax.make_jaxpr(functools.partial(y_and_gradients, f))(dy, *arrays)
        names = [equation.primitive.name for equation in jaxprs.equations(traced.jaxpr)]
        return names.count("eqx_norm_dot_products"), names.count("eqx_norm_affine")

    _, pull_back = jax.vjp(of_each, x, weight, bias)
    kept = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.size >= x.size]
    assert sum(leaf is x for leaf in kept) == 1
    assert len(kept) == 1 + 2 * (weight.size == x.size)  # and weights of all values
    assert passes(of_each, x, weight, bias) == passes(of_all, x, weight[0], bias[0])


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm"])
def test_new_layer_with_weight_offset_multiplies_by_one(name):
    """Fails if the weight starts at 1, which would multiply by 2:
    https://github.com/huggingface/transformers/issues/40796."""
    layer, call = made(name, SHAPE, dtype=jnp.bfloat16, weight_offset=1.0)
    assert not layer.weight.any()
    x, plain = normal(0, (N, *SHAPE)), made(name, SHAPE, dtype=jnp.bfloat16)[0]
    assert bits(call(layer, x)[0]) == bits(call(plain, x)[0])


def test_gradient_of_a_bias_that_examples_along_two_axes_share():
    """Tests that the cotangent of a bias is summed over both axes along which only the weight
    has values of its own."""
    x, dy, weight = normal(0, (2, 3, 5)), normal(1, (2, 3, 5)), normal(2, (2, 3, 5))
    layer = LayerNorm(5)

    def loss(bias):
        y = jax.vmap(jax.vmap(lambda x, w: layer(x, weight=w, bias=bias)))(x, weight)
        return jnp.vdot(y, dy)

    gradient = jax.grad(loss)(jnp.zeros(5))
    np.testing.assert_allclose(gradient, dy.sum((0, 1)), rtol=1e-6, atol=1e-6)
