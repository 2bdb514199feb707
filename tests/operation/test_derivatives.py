"""Compares derivatives of all orders, by every transformation, with the written-out formula.

tests/fuzz.py tests derivatives of all layers up to second order, also over a mesh.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm

from .cases import LAYERS, MASKED_PASSES, PASSES, Case, N, batch_norm_of_one
from .derivatives import (
    BASIC,
    ENSEMBLES,
    FIRST_ORDER,
    HIGHER,
    assert_agree,
    directional,
    gradient,
    in_one_operand,
    mapped,
    slope_of_gradient,
)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("name", PASSES)
def test_derivatives_of_passes(name, masked):
    """Tests every rule that JAX requires of a primitive. JAX may change the interface for new
    primitives; this test then fails."""
    case = (MASKED_PASSES if masked else PASSES)[name]
    assert_agree((*BASIC, in_one_operand, *ENSEMBLES), case.with_mask)
    operands, others = (
        (*arrays, *case.masks[i : i + 1])
        for i, arrays in enumerate((case.operands, case.tangents))
    )
    assert_agree([mapped], case._replace(operands=operands, tangents=others))


@pytest.mark.parametrize(
    "transforms",
    [
        (*BASIC, in_one_operand),
        FIRST_ORDER,
        pytest.param(HIGHER, marks=pytest.mark.long),
        ENSEMBLES,
    ],
    ids=["basic", "1", "n", "vmap"],
)
@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_of_layers(name, transforms):
    assert_agree(transforms, LAYERS[name], 1e-8 if transforms == HIGHER else 1e-10)


def test_gradient_inside_the_named_vmap():
    """Sums the cotangents of all examples, because each loss depends on all examples."""

    def inside(transform):
        def added(_, primals, tangents):
            axes = None, None, None, 0
            of_each = jax.vmap(
                lambda *p: transform(batch_norm_of_one, p, tangents), axes, axis_name="batch"
            )
            *vectors, dx = of_each(*primals)
            return [vector.sum(0) for vector in vectors], dx

        return added

    assert_agree([gradient], LAYERS["BatchNorm"], wrap=inside)


def test_derivatives_if_x_does_not_vary_over_the_named_axis():
    case = LAYERS["BatchNorm"]
    same = jax.vmap(batch_norm_of_one, (None,) * 4, axis_name="batch", axis_size=N)

    def repeated(*operands):
        *vectors, x = operands
        return case.formula(*vectors, jnp.broadcast_to(x, (N, *x.shape)))

    arrays = ((*vectors, x[0]) for *vectors, x in (case.operands, case.tangents))
    assert_agree((gradient, directional, slope_of_gradient), Case(same, repeated, *arrays))


def test_second_derivative_at_a_large_variance_does_not_underflow():
    """Fails if a quotient by the variance underflows to 0, and so the whole product is 0."""
    layer, random = LayerNorm(32, use_weight=False, use_bias=False), np.random.default_rng(0)
    x, dx, dy = random.standard_normal((3, 32)).astype(np.float32)

    @jax.jit
    def slope_of_gradient(x, dx):
        return jax.jvp(lambda x: jax.vjp(layer, x)[1](dy)[0], (x,), (dx,))[1]

    # If x and dx are larger by a factor, the second derivative along dx is smaller by it.
    large, small = (slope_of_gradient(x * scale, dx * scale) for scale in (2.0**44, 2.0**20))
    assert jnp.abs(small).min() > 0
    np.testing.assert_array_equal(large * 2.0**24, small)
