"""Compares derivatives of all orders, by every transformation, with the written-out formula."""

import jax
import jax.numpy as jnp
import pytest

from tests.compiling import XLA_FLAGS
from tests.processes import on_devices

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
def test_passes(name, masked):
    """Tests every rule that JAX asks of a primitive. The interface for new primitives is the
    one that JAX may change; this is where it is noticed."""
    case = (MASKED_PASSES if masked else PASSES)[name]
    assert_agree((*BASIC, in_one_operand, *ENSEMBLES), case.with_mask)
    operands, others = (
        (*arrays, *case.masks[i : i + 1])
        for i, arrays in enumerate((case.operands, case.tangents))
    )
    assert_agree([mapped], case._replace(operands=operands, tangents=others))


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    assert_agree((*BASIC, in_one_operand), LAYERS[name])


@pytest.mark.parametrize("transforms", [FIRST_ORDER, HIGHER, ENSEMBLES], ids=["1", "n", "vmap"])
@pytest.mark.parametrize(
    "name", ["batch, gelu", "smooth_start, gelu", "LayerNorm, jitted tanh"]
)
def test_every_transformation(name, transforms):
    assert_agree(transforms, LAYERS[name], 1e-8 if transforms == HIGHER else 1e-10)


@pytest.mark.parametrize("name", ["batch, gelu", "ema, relu", "smooth_start, gelu"])
def test_a_gradient_taken_inside_of_the_named_vmap(name):
    """Adds up what the others send back: each example's loss also depends on them."""
    one, axes = batch_norm_of_one(*name.split(", ")), (None, None, None, 0)

    def inside(transform):
        def added(f, primals, tangents):
            of_each = jax.vmap(lambda *p: transform(one, p, tangents), axes, axis_name="batch")
            *vectors, dx = of_each(*primals)
            return [vector.sum(0) for vector in vectors], dx

        return added

    assert_agree([gradient], LAYERS[name], wrap=inside)


@pytest.mark.parametrize("name", ["smooth_start, gelu", "batch, none"])
def test_x_that_does_not_vary_over_the_named_axis(name):
    one, case = batch_norm_of_one(*name.split(", ")), LAYERS[name]
    same = jax.vmap(one, in_axes=(None,) * 4, axis_name="batch", axis_size=N)

    def repeated(*operands):
        *vectors, x = operands
        return case.formula(*vectors, jnp.broadcast_to(x, (N, *x.shape)))

    arrays = ((*vectors, x[0]) for *vectors, x in (case.operands, case.tangents))
    assert_agree((gradient, directional, slope_of_gradient), Case(same, repeated, *arrays))


@pytest.mark.long
def test_over_a_mesh():
    file = "tests/operation/over_mesh.py"
    on_devices(4, "-m", "pytest", "-p", "no:cacheprovider", file, flags=XLA_FLAGS)
