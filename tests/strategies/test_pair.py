"""Tests the arithmetic of pairs of floats."""

import jax
import numpy as np

from eqx_norm._jax.arithmetic import uncontracted
from tests.helpers import f32, normal


def test_a_product_is_rounded_before_it_is_subtracted():
    """Fails on processors with a fused multiply-add if XLA contracts the product."""
    a, b = f32(normal(0, (100,))), f32(normal(1, (100,)))
    products = f32(np.asarray(a) * np.asarray(b))
    differences = jax.jit(lambda a, b, c: uncontracted(a * b) - c)(a, b, products)
    np.testing.assert_array_equal(differences, 0)
