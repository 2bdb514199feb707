"""Tests that LayerNorm is a drop-in for eqx.nn.LayerNorm, made of BatchNorm's operation."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm
from tests.compiling import filter_jit, jit
from tests.helpers import bits, normal, over_batch
from tests.test_residuals import held, printed

SHAPES = [(6,), (3, 4), (2, 3, 2), (1,), ()]
AFFINE = [(True, True), (True, False), (False, True), (False, False)]
ACTIVATIONS = {
    "none": None,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "prelu": eqx.nn.PReLU(0.25),
}
each_activation = pytest.mark.parametrize("name", ACTIVATIONS)


def both(shape, weight=True, bias=True, seed=0, **more):
    """Returns this layer and Equinox's, with the same weight and bias."""
    kinds = {"use_weight": weight, "use_bias": bias}
    ours, theirs = LayerNorm(shape, **kinds, **more), eqx.nn.LayerNorm(shape, **kinds, **more)
    new = [
        None if old is None else old + 0.3 * normal(seed + i, old.shape).astype(old.dtype)
        for i, old in enumerate((ours.weight, ours.bias))
    ]
    none = {"is_leaf": lambda leaf: leaf is None}
    return [eqx.tree_at(lambda m: (m.weight, m.bias), m, new, **none) for m in (ours, theirs)]


@filter_jit
def differentiate(layer, x, dy):
    def f(layer_and_x):
        layer, x = layer_and_x
        return jnp.sum(jax.vmap(layer)(x) * dy)

    return jax.vmap(layer)(x), eqx.filter_grad(f)((layer, x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("weight", "bias"), AFFINE)
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


@pytest.mark.parametrize(
    ("shape", "of_x", "message"),
    [
        ((4,), (5,), r"x has shape \(5,\).*shape=\(4,\).*Make the layer with the shape"),
        ((3, 4), (4, 3), r"x has shape \(4, 3\).*shape=\(3, 4\)"),
        ((3, 4), (4,), r"x has shape \(4,\).*shape=\(3, 4\)"),
        (
            (3, 4),
            (2, 3, 4),
            r"x has shape \(2, 3, 4\).*shape=\(3, 4\).* jax.vmap\(layer\)\(x\)",
        ),
        ((4,), (5, 3, 4), r"jax.vmap\(jax.vmap\(layer\)\)\(x\)"),
        ((), (3,), r"x has shape \(3,\).*shape=\(\).*jax.vmap\(layer\)\(x\)"),
    ],
)
def test_another_shape_is_an_error_before_any_computation(shape, of_x, message):
    """Asked for in https://github.com/Oneflow-Inc/oneflow/issues/6149."""
    layer = LayerNorm(shape)

    def traced(x):
        with pytest.raises(ValueError, match=message):
            layer(x)
        return x

    assert [e.primitive.name for e in jax.make_jaxpr(traced)(jnp.ones(of_x)).eqns] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": 0}, "shape=0.*1 or more"),
        ({"shape": (3, -1)}, r"shape=\(3, -1\)"),
        ({"shape": 3, "eps": 0.0}, "eps=0.0.*greater than 0"),
        ({"shape": 3, "dtype": jnp.int32}, "dtype=int32.*float"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        LayerNorm(**arguments)


def test_integers_are_refused():
    with pytest.raises(TypeError, match=r"x has dtype int32.*x.astype"):
        LayerNorm(3)(jnp.arange(3, dtype=jnp.int32))


@each_activation
def test_an_activation_is_as_if_applied_afterwards(name):
    activation = ACTIVATIONS[name]
    plain, _ = both((3, 4))
    fused = LayerNorm((3, 4), activation=activation)
    fused = eqx.tree_at(lambda m: (m.weight, m.bias), fused, (plain.weight, plain.bias))
    x, dy = normal(2, (5, 3, 4), 1.0, 2.0), normal(3, (5, 3, 4))
    y, (of_layer, dx) = differentiate(fused, x, dy)

    def after(plain, x):
        y = jax.vmap(plain)(x)
        return y if activation is None else activation(y)

    def loss(plain_and_x):
        return jnp.sum(after(*plain_and_x) * dy)

    np.testing.assert_allclose(y, after(plain, x), rtol=1e-6, atol=1e-6)
    dplain, dx_after = filter_jit(eqx.filter_grad(loss))((plain, x))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(dx, dx_after)
    close(of_layer.weight, dplain.weight)
    close(of_layer.bias, dplain.bias)
    if name == "prelu":
        negative = jnp.where(jax.vmap(plain)(x) < 0, jax.vmap(plain)(x) * dy, 0)
        close(of_layer.activation.negative_slope, negative.sum())


def test_an_activation_that_is_not_elementwise():
    message = re.escape("must be elementwise: given an array of shape (3, 4)")
    with pytest.raises(ValueError, match=f"(?s)activation=.*{message}"):
        LayerNorm((3, 4), activation=eqx.nn.Linear(4, 2, key=jax.random.key(0)))(
            jnp.ones((3, 4))
        )


@each_activation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("read", [printed, held])
def test_x_is_kept_and_vectors(name, dtype, read):
    layer = LayerNorm(40, activation=ACTIVATIONS[name])

    def f(affine, x):
        return jax.vmap(eqx.tree_at(lambda m: (m.weight, m.bias), layer, affine))(x)

    x = normal(0, (8, 40)).astype(dtype)
    kept = read(f, (jnp.ones(40), jnp.zeros(40)), x)
    short = {"float32": "f32", "bfloat16": "bf16"}[x.dtype.name]
    assert [(t, size) for t, size in kept if size > 40] == [(short, x.size)]


@pytest.mark.parametrize("read", [printed, held])
def test_more_is_found_in_equinox_s(read):
    x = normal(0, (8, 40)).astype(jnp.bfloat16)
    kept = read(lambda x: jax.nn.silu(jax.vmap(eqx.nn.LayerNorm(40))(x)), x)
    assert len([size for _, size in kept if size == x.size]) > 1


def reference(weight, bias, x):
    """Computes the definition in plain jax.numpy, for derivatives of all orders."""
    mean, variance = x.mean(), x.var()
    return jnp.tanh((x - mean) / jnp.sqrt(variance + 1e-5) * weight + bias)


def ours(weight, bias, x):
    layer = LayerNorm(4, activation=jnp.tanh)
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))(x)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jacrev(f, argnums=(0, 1, 2)),
        lambda f: jit(jax.jacfwd(f, argnums=(0, 1, 2))),
        lambda f: jit(jax.hessian(lambda *a: f(*a).sum(), argnums=(0, 1, 2))),
        lambda f: jit(
            jax.grad(lambda *a: jnp.sum(jax.grad(lambda *b: jnp.sum(f(*b) ** 2), 2)(*a) ** 2))
        ),
        lambda f: jit(jax.checkpoint(jax.jacrev(f, argnums=(0, 1, 2)))),
        lambda f: jit(
            lambda w, b, x: jax.vmap(jax.grad(lambda x: jnp.sum(f(w, b, x) ** 2)))(
                jnp.stack([x, 2 * x, x**2])
            )
        ),
        lambda f: jit(lambda w, b, x: jax.linearize(f, w, b, x)[1](b, w, x)),
    ],
    ids=["op by op", "jacfwd", "hessian", "penalty", "remat", "vmap of grad", "linearize"],
)
def test_derivatives(transform):
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        given = [jnp.asarray(random.normal(size=4)) for _ in range(3)]
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
    layer = LayerNorm(6)
    assert jax.vmap(layer)(x).dtype == dtype
    with jax.numpy_dtype_promotion("strict"):
        half = LayerNorm(6, dtype=dtype)
        y, (gradients, dx) = differentiate(half, x, x)
    assert y.dtype == dx.dtype == gradients.weight.dtype == dtype


@pytest.mark.x32  # Equinox's layer promotes
def test_complex_numbers():
    x = normal(0, (5, 6), 1.0) + 1j * normal(1, (5, 6), -2.0, 3.0)
    ours, theirs = LayerNorm(6, dtype=jnp.complex64), eqx.nn.LayerNorm(6, dtype=jnp.complex64)
    y, right = (jit(jax.vmap(layer))(x) for layer in (ours, theirs))
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)


def test_saved_and_loaded(tmp_path):
    layer, _ = both((3, 4))
    eqx.tree_serialise_leaves(tmp_path / "layer", layer)
    again = eqx.tree_deserialise_leaves(tmp_path / "layer", LayerNorm((3, 4)))
    assert eqx.tree_equal(layer, again)
    # As Equinox's: the leaves are the same.
    theirs = eqx.tree_deserialise_leaves(tmp_path / "layer", eqx.nn.LayerNorm((3, 4)))
    assert bits(theirs.weight) == bits(layer.weight)


def test_it_passes_through_jit_as_an_argument():
    layer = LayerNorm(4, activation=jax.nn.relu)
    x = normal(0, (4,))
    as_argument = jax.jit(lambda layer, x: layer(x))(layer, x)
    assert bits(as_argument) == bits(jax.jit(lambda x: layer(x))(x))
