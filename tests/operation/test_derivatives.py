"""Compares derivatives of all orders, by every transformation, with the written-out formula."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from eqx_norm.strategies import Running
from tests.compiling import jit
from tests.helpers import APPROACHES, make, over_batch

from .derivatives import (
    ACTIVATIONS,
    COTANGENT,
    ENSEMBLES,
    FIRST_ORDER,
    HIGHER,
    MEAN,
    MOMENTUM,
    SEEN,
    VARIANCE,
    C,
    L,
    N,
    arrays,
    assert_agree,
    compiled,
    definition,
    directional,
    gradient,
    gradient_of_gradient,
    one_step,
    ours,
    slope_of_gradient,
)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


exactly: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
some_approaches = pytest.mark.parametrize("approach", ["batch", "ema", "smooth_start"])


OTHERS = sorted({*APPROACHES} - {"batch", "ema", "smooth_start"})


@pytest.mark.parametrize(
    ("transforms", "approach", "name"),
    [
        *((FIRST_ORDER, "batch", name) for name in ACTIVATIONS),
        (FIRST_ORDER, "ema", "none"),
        (FIRST_ORDER, "ema", "relu"),
        (FIRST_ORDER, "smooth_start", "none"),
        (FIRST_ORDER, "smooth_start", "gelu"),
        *(((gradient, slope_of_gradient), other, "silu") for other in OTHERS),
        (HIGHER, "batch", "none"),
        (HIGHER, "smooth_start", "relu"),
        (HIGHER, "ema", "silu"),
        (HIGHER, "batch", "gelu"),
        (ENSEMBLES, "batch", "none"),
        (ENSEMBLES, "batch", "gelu"),
    ],
)
def test_against_the_formula(transforms, approach, name, x64):
    pair = (f(approach, ACTIVATIONS[name]) for f in (ours, definition))
    tolerance = 1e-8 if transforms == HIGHER else 1e-10
    assert_agree(transforms, *pair, *arrays(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_float32_against_the_formula_in_float64(name):
    @compiled
    def derive(f, primals, tangents):
        transforms = gradient, directional, slope_of_gradient, gradient_of_gradient
        return [transform(f, primals, tangents) for transform in transforms]

    results = derive(ours("batch", ACTIVATIONS[name]), *arrays(np.float32))
    with jax.enable_x64(True):
        rights = derive(definition("batch", ACTIVATIONS[name]), *arrays())
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(rights), strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_finite_differences(x64):
    """The formulas of the other tests are differentiated by JAX; this needs no derivative."""
    f = jax.jit(ours("smooth_start", jax.nn.gelu))
    check_grads(f, arrays()[0], order=2, modes=("fwd", "rev"), eps=1e-5)


def test_compiled_before_it_is_differentiated(x64):
    """Differentiates what has been mapped already: grad(jit(vmap(layer)))."""

    def mapped_and_compiled(model):
        return jax.jit(over_batch(model))

    f, right = ours("batch", jax.nn.silu, mapped_and_compiled), definition("batch", jax.nn.silu)
    for transform in (gradient, slope_of_gradient):
        expected = compiled(transform)(right, *arrays())
        for derive in (transform, compiled(transform)):
            result = derive(f, *arrays())
            for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, **exactly)


@pytest.mark.parametrize("name", ["none", "silu"])
@some_approaches
def test_a_gradient_taken_inside_of_the_named_vmap(approach, name, x64):
    """Adds up what the others send back: each example's loss also depends on them."""

    def inside(model):
        def one(x, c, state):
            def loss(vectors, x):
                with_vectors = eqx.tree_at(lambda m: (m.weight, m.bias), model, vectors)
                return jnp.vdot(jnp.sin(with_vectors(x, state)[0]), c)

            return jax.grad(loss, (0, 1))((model.weight, model.bias), x), None

        axes = {"axis_name": "batch", "in_axes": (0, 0, None), "out_axes": 0}
        return lambda x, state: jax.vmap(one, **axes)(x, jnp.asarray(COTANGENT), state)

    primals, tangents = arrays()
    (dweights, dbiases), dx = jit(ours(approach, ACTIVATIONS[name], inside))(*primals)
    right = compiled(gradient)(definition(approach, ACTIVATIONS[name]), primals, tangents)
    for a, b in zip((dweights.sum(0), dbiases.sum(0), dx), right, strict=True):
        np.testing.assert_allclose(a, b, **exactly)


@pytest.mark.parametrize("activation", [None, jax.nn.silu], ids=["none", "silu"])
@some_approaches
def test_through_all_steps_of_a_scan(approach, activation, x64):
    """Tests that no gradient flows from one step to the next by way of the memory."""
    layer, state = make(C, "batch", approach=approach, momentum=MOMENTUM, activation=activation)
    memory = Running(*map(jnp.asarray, (MEAN, VARIANCE, SEEN)))

    def our_step(vectors, state, x):
        model = eqx.tree_at(lambda m: (m.weight, m.bias), layer, vectors)
        y, state = over_batch(model)(x, state)
        return state, y

    def right_step(vectors, memory, x):
        y, memory = one_step(approach, activation, vectors, memory, x)
        return memory, y

    def loss(step, init, vectors, x):
        def body(carry, scale):
            x, state = carry
            state, y = step(vectors, state, scale * x)
            return (x + jnp.sin(y), state), y

        _, ys = jax.lax.scan(body, (x, init), jnp.array([1.0, 0.5, 2.0]))
        return jnp.sum(jnp.cos(ys) * COTANGENT)

    (*vectors, x), _ = arrays()
    derive = compiled(jax.grad(loss, (2, 3)))
    result = derive(our_step, state.set(layer.memory_index, memory), tuple(vectors), x)
    right = derive(right_step, (MEAN, VARIANCE, SEEN), tuple(vectors), x)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, **exactly)


@pytest.mark.parametrize("name", ["none", "silu"])
def test_x_that_does_not_vary_over_the_named_axis(name, x64):
    def same_for_all(model):
        return jax.vmap(
            model, axis_name="batch", in_axes=(None, None), out_axes=(0, None), axis_size=N
        )

    (weight, bias, x), (*d_vectors, dx) = arrays()
    f = ours("smooth_start", ACTIVATIONS[name], same_for_all)
    right = definition("smooth_start", ACTIVATIONS[name])

    def repeated(weight, bias, x):
        return right(weight, bias, jnp.broadcast_to(x, (N, C, L)))

    one = (weight, bias, x[0]), (*d_vectors, dx[0])
    assert_agree((gradient, directional, slope_of_gradient), f, repeated, *one, **exactly)
