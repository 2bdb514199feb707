"""Defines fixtures of the kernels' tests."""

import jax.numpy as jnp
import pytest

from eqx_norm._normalise.gpu import lanes, tiling

# The same work cut up in other ways, so that few values get to all parts of a kernel: one
# program does all of it, chunk after chunk; or each has one chunk, and there is much to merge.
CUTS = {
    "as it is": {},
    "loops": {"_PROGRAMS": 1, "_MOST_HELD": 128, "_HELD": 8},
    "slices": {"_PROGRAMS": 2**20, "_MOST_HELD": 128, "_HELD": 8, "_SLICE": 1},
}


@pytest.fixture
def cut(request, monkeypatch):
    for name, value in CUTS[request.param].items():
        monkeypatch.setattr(tiling, name, value)


@pytest.fixture
def _tree(monkeypatch):
    """Adds lanes in a tree, as Triton does; the interpreter would add one after the other."""

    def total(values, axis):
        while (half := values.shape[axis] // 2) > 0:
            front, back = jnp.split(values, [half], axis)
            values = front + back
        return values.squeeze(axis)

    monkeypatch.setattr(lanes, "total", total)
