"""Tests what a layer sends over however many devices there are, and what it makes of that.

Run by test_devices.py, in processes with 16 and with 64 devices.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import make

from .ways import SPLIT, WHOLE, forward, mesh_of, over_mesh, run

C = 100  # not a multiple of the number of devices


@pytest.mark.parametrize(
    "devices", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 8, 64)), 16]
)
def test_what_is_sent_does_not_grow_with_the_devices(devices):
    """Tests shards that lie far from each other, of which one channel is constant."""
    layer, state = make(C, ("batch", "devices"), approach="batch")
    random = np.random.default_rng(0)
    x = random.standard_normal((devices, 2, C, 3))
    x += 100 * random.standard_normal((devices, 1, C, 1))
    x[:, :, 0] = 0.1
    x = jnp.asarray(x.reshape(2 * devices, C, 3), jnp.float32)
    f = over_mesh(forward, (SPLIT, WHOLE), mesh_of(devices=devices))
    (y, _), sent = run(f, layer, state, x)
    # Each vector as often as there are devices, if these are few: else once there and back.
    whole, padded = C * devices, -(-C // devices) * devices
    there, back = ("all-to-all", 4 * padded), ("all-gather", 4 * padded)
    assert sent == ([("all-gather", 4 * whole)] if devices <= 8 else [there, back])
    exact = np.asarray(x, np.float64)
    centred = exact - exact.mean((0, 2), keepdims=True)
    expected = centred / np.sqrt(exact.var((0, 2), keepdims=True) + layer.eps)
    assert np.abs(y - expected).max() < 2e-6
    assert (np.asarray(y)[:, 0] == 0).all()
