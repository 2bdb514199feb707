"""Runs the kernels on a CPU in Pallas' interpreter for all devices."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from eqx_norm._normalise.kernels import columns, gpu_rows, rows, tile, tpu_rows


def take_the_cpu_for(platform, monkeypatch):
    """Makes programs for a CPU use the kernels of a platform, "cuda" or "tpu"."""
    for module in (columns, rows):
        monkeypatch.setattr(module, "platform", lambda *_: platform)
    if platform == "tpu":
        call = functools.partial(pl.pallas_call, interpret=True)  # reads NaN beyond x
        monkeypatch.setattr(pl, "pallas_call", call)
        monkeypatch.setattr(tpu_rows, "_VALUES", 256 * tpu_rows._LANES)  # 256 short rows
        return
    for name in ("call", "load", "store", "sum_along", "zeros"):
        monkeypatch.setattr(tile, name, globals()[name])
    monkeypatch.setattr(gpu_rows, "_added", lambda sums: [sum_along(v, 0) for v in sums])


def call(body, arrays, outputs, programs):
    """Runs the programs one after another on outputs that hold NaN."""

    def run(*refs):
        body(pl.program_id(0), *refs)

    return list(pl.pallas_call(run, outputs, grid=(programs,), interpret=True)(*arrays))


def load(ref, tile=None):
    return ref[...].astype(jnp.float32)


def store(ref, value):
    ref[...] = value.astype(ref.dtype)


def zeros(shape, tile):
    return lax.full(shape, 0, jnp.float32)


def sum_along(values, axis):
    """Sums values in a tree, as a GPU does; XLA:CPU adds one value after another."""
    lanes = jnp.moveaxis(values, axis, 0)
    while (half := len(lanes) // 2) > 0:
        lanes = jnp.concatenate([lanes[:half] + lanes[half : 2 * half], lanes[2 * half :]])
    return lanes[0]
