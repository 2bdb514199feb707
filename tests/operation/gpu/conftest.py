"""Defines the fixtures of the kernel's tests."""

import pytest

from eqx_norm._normalise.gpu import lanes, tiling

from .backends import BACKENDS

# The same work cut up in other ways, so that few values get to all parts of a kernel: one
# program does all of it, chunk after chunk; or each has one chunk, and there is much to merge.
CUTS = {
    "as it is": {},
    "loops": {"_PROGRAMS": 1, "_HELD": 8},
    "slices": {"_PROGRAMS": 2**20, "_HELD": 8, "_SLICE": 1},
}


@pytest.fixture
def cut(request, monkeypatch):
    for name, value in CUTS[request.param].items():
        monkeypatch.setattr(tiling, name, value)
    return request.param


@pytest.fixture
def backend(request, monkeypatch):
    # GPUs add lanes in a tree; the interpreter would add one after the other.
    monkeypatch.setattr(lanes, "total", by_tree)
    return BACKENDS[request.param]


def by_tree(values):
    half = len(values) // 2
    return by_tree(values[:half] + values[half:]) if half else values[0]
