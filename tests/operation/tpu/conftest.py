"""Lets the kernels for a TPU run on a CPU."""

import functools

import pytest
from jax.experimental import pallas as pl

from eqx_norm._normalise.tpu import kernel, rows


@pytest.fixture
def interpreted(monkeypatch):
    """Takes a CPU for a TPU; Pallas interprets the kernels, with NaN beyond the end of x."""
    monkeypatch.setattr(rows, "_PLATFORM", "cpu")
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


@pytest.fixture
def small_blocks(monkeypatch):
    """Gives blocks 32 rows, so that few values fill many."""
    monkeypatch.setattr(kernel, "_VALUES", 32 * kernel._LANES)
