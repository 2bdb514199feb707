"""Defines a fixture of the kernels' tests."""

import pytest

from eqx_norm._normalise.gpu import tiling

from .backends import CUTS


@pytest.fixture
def cut(request, monkeypatch):
    for name, value in CUTS[request.param].items():
        monkeypatch.setattr(tiling, name, value)
