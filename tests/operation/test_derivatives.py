"""Compares derivatives of all orders, by every transformation, with the written-out formula."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.compiling import jit
from tests.helpers import APPROACHES

from .derivatives import (
    ACTIVATIONS,
    DIRECTION,
    ENSEMBLES,
    FIRST_ORDER,
    HIGHER,
    POINT,
    C,
    L,
    N,
    assert_agree,
    compiled,
    definition,
    directional,
    gradient,
    ours,
    slope_of_gradient,
)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


OTHERS = sorted({*APPROACHES} - {"batch", "ema", "smooth_start"})


@pytest.mark.parametrize(
    ("transforms", "approach", "name"),
    [
        *((FIRST_ORDER, "batch", name) for name in ACTIVATIONS),
        (FIRST_ORDER, "ema", "relu"),
        (FIRST_ORDER, "smooth_start", "none"),
        *(((gradient, slope_of_gradient), other, "silu") for other in OTHERS),
        (HIGHER, "batch", "none"),
        (HIGHER, "batch", "gelu"),
        (HIGHER, "ema", "silu"),
        (HIGHER, "smooth_start", "relu"),
        (ENSEMBLES, "batch", "none"),
        (ENSEMBLES, "batch", "gelu"),
    ],
)
def test_against_the_formula(transforms, approach, name):
    pair = (f(approach, ACTIVATIONS[name]) for f in (ours, definition))
    assert_agree(transforms, *pair, tolerance=1e-8 if transforms == HIGHER else 1e-10)


@pytest.mark.long
def test_finite_differences():
    """The formulas of the other tests are differentiated by JAX; this needs no derivative."""
    f = jax.jit(ours("smooth_start", jax.nn.gelu))
    check_grads(f, POINT, order=2, modes=("fwd", "rev"), eps=1e-5)


@pytest.mark.parametrize("name", ["none", "silu"])
@pytest.mark.parametrize("approach", ["batch", "ema", "smooth_start"])
def test_a_gradient_taken_inside_of_the_named_vmap(approach, name):
    """Adds up what the others send back: each example's loss also depends on them."""

    def inside(model):
        def one(x, state):
            def loss(vectors, x):
                with_vectors = eqx.tree_at(lambda m: (m.weight, m.bias), model, vectors)
                return jnp.sum(jnp.sin(with_vectors(x, state)[0] + 1))

            return jax.grad(loss, (0, 1))((model.weight, model.bias), x), None

        return jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=0)

    (dweights, dbiases), dx = jit(ours(approach, ACTIVATIONS[name], inside))(*POINT)
    right = compiled(gradient)(definition(approach, ACTIVATIONS[name]), POINT, DIRECTION)
    for a, b in zip((dweights.sum(0), dbiases.sum(0), dx), right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["none", "silu"])
def test_x_that_does_not_vary_over_the_named_axis(name):
    def same_for_all(model):
        axes = {"axis_name": "batch", "axis_size": N, "in_axes": (None, None)}
        return jax.vmap(model, out_axes=(0, None), **axes)

    def repeated(weight, bias, x):
        right = definition("smooth_start", ACTIVATIONS[name])
        return right(weight, bias, jnp.broadcast_to(x, (N, C, L)))

    f = ours("smooth_start", ACTIVATIONS[name], same_for_all)
    one = ((*vectors, x[0]) for *vectors, x in (POINT, DIRECTION))
    assert_agree((gradient, directional, slope_of_gradient), f, repeated, *one)
