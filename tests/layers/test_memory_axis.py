"""Tests the example of `ghost_batches`.

tests/fuzz.py tests `memory_axis_name`; tests/devices/over_uses.py tests it on a mesh.
"""

import equinox as eqx
import jax
import numpy as np
import pytest

from eqx_norm import BatchNorm, ghost_batches
from tests.helpers import example, normal


@pytest.mark.x32
def test_ghost_batches_example():
    names = {"eqx": eqx, "jax": jax, "BatchNorm": BatchNorm, "ghost_batches": ghost_batches}
    names = example(ghost_batches, x=normal(0, (64, 16, 3)), **names)
    assert names["y"].shape == names["x"].shape
    np.testing.assert_allclose(names["y"][:32].mean((0, 2)), np.zeros(16), atol=2e-6)
