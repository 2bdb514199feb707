"""Tests that vectors computed in one loop are those computed in several."""

import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm._normalise.one_loop import in_one_loop
from tests.helpers import same


def test_in_one_loop_changes_nothing():
    row = np.array([-0.0, 0.0, np.nan, -np.inf, np.inf, 1e-45, -3.5], np.float32)
    tree = {
        "floats": [jnp.asarray(row), jnp.asarray(-row), jnp.asarray(2 * row)],
        "others": [jnp.asarray(row, jnp.bfloat16), jnp.asarray(-row, jnp.bfloat16)],
        "integers": [jnp.arange(-3, 4), jnp.array(7), jnp.array(-(2**31), jnp.int32)],
        "booleans": [jnp.arange(7) > 2, jnp.arange(7) > 3, jnp.array(False)],
        "complex": jnp.asarray(row + 1j),
    }
    assert same(jax.jit(in_one_loop)(tree), tree)
    assert same(in_one_loop(tree), tree)


def test_in_one_loop_of_some_that_are_mapped():
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.arange(3.0)
    axes = ((0, 1, None),)
    mapped = jax.jit(jax.vmap(in_one_loop, in_axes=axes))((a, a.T, b))
    assert same(mapped, (a, a, jnp.stack([b, b])))
