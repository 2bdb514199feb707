"""Compares derivatives of all orders, by every transformation, with the written-out formula.

tests/layers/test_fuzz.py tests derivatives of all layers up to second order.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import LayerNorm
from tests.compiling import jit
from tests.helpers import y_and_gradients

from .cases import BATCH_NORM, LAYERS, MASKS, RMS_NORM, Case, batch_norm_of_one
from .derivatives import BASIC, HIGHER, REPEATED, gradient, in_one_operand, mapped


def assert_agree(transforms, case, tolerance=1e-10):
    """Compares all transforms of a function with those of its formula. All transforms of either
    are one program."""

    def derivatives(f):
        compiled = jit(lambda p, t: [transform(f, p, t) for transform in transforms])
        return compiled(case.operands, case.tangents)

    with jax.enable_x64(True):
        actual, expected = map(derivatives, (case.f, case.formula))
    for transform, *results in zip(transforms, actual, expected, strict=True):
        for a, b in zip(*map(jax.tree.leaves, results), strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, b, tolerance, tolerance, transform.__name__)


# Moments that are given, and those of x itself, with an activation that is elementwise or not.
TRANSFORMED = [
    ("BatchNorm, mask", (*BASIC, in_one_operand)),
    ("RMSNorm, mask", (*BASIC, in_one_operand)),
    ("LayerNorm", BASIC),
    ("BatchNorm, mask", REPEATED),
    ("LayerNorm", REPEATED),
    *(pytest.param(name, HIGHER, marks=pytest.mark.long) for name in LAYERS),
]


@pytest.mark.parametrize(("name", "transforms"), TRANSFORMED)
def test_derivatives_of_layers(name, transforms):
    """Tests every rule that JAX requires of a primitive. JAX may change the interface for new
    primitives; this test then fails."""
    assert_agree(transforms, LAYERS[name], 1e-8 if transforms == HIGHER else 1e-10)


@pytest.mark.parametrize("case", [BATCH_NORM, RMS_NORM], ids=["BatchNorm", "RMSNorm"])
def test_layers_mapped_over_any_operands(case):
    operands, others = ((*arrays, mask) for arrays, mask in zip(case[2:], MASKS, strict=True))
    assert_agree([mapped], case._replace(operands=operands, tangents=others))


def test_gradient_inside_the_named_vmap():
    """Sums the cotangents of all examples, because each loss depends on all examples."""

    def inside(*primals):
        axes = None, None, None, 0
        of_one = lambda *p: gradient(batch_norm_of_one, p, ())  # noqa: E731
        *vectors, dx = jax.vmap(of_one, axes, axis_name="batch")(*primals)
        return *(vector.sum(0) for vector in vectors), dx

    def outside(*primals):
        return gradient(BATCH_NORM.formula, primals, ())

    assert_agree(BASIC[:1], BATCH_NORM._replace(f=inside, formula=outside))


def test_derivatives_if_x_does_not_vary_over_the_named_axis():
    shape = BATCH_NORM.operands[-1].shape
    same = jax.vmap(batch_norm_of_one, (None,) * 4, axis_name="batch", axis_size=shape[0])

    def repeated(*operands):
        *vectors, x = operands
        return BATCH_NORM.formula(*vectors, jnp.broadcast_to(x, shape))

    arrays = ((*vectors, x[0]) for *vectors, x in BATCH_NORM[2:])
    assert_agree(BASIC, Case(same, repeated, *arrays))


def test_second_derivative_at_a_large_variance_does_not_underflow():
    """Fails if a quotient by the variance underflows to 0, and so the whole product is 0."""
    layer, random = LayerNorm(32, use_weight=False, use_bias=False), np.random.default_rng(0)
    x, dx, dy = random.standard_normal((3, 32)).astype(np.float32)

    @jax.jit
    def slope_of_gradient(x, dx):
        return jax.jvp(lambda x: y_and_gradients(layer, dy, x)[1], (x,), (dx,))[1]

    # If x and dx are larger by a factor, the second derivative along dx is smaller by it.
    large, small = (slope_of_gradient(x * scale, dx * scale) for scale in (2.0**44, 2.0**20))
    assert jnp.abs(small).min() > 0
    np.testing.assert_array_equal(large * 2.0**24, small)
