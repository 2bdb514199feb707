"""Tests what a layer sends over however many devices there are, and what it makes of that.

Run by test_devices.py, in processes that have from 2 to 64.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import make

from .ways import SPLIT, WHOLE, collectives, forward

C = 100  # not a multiple of the number of devices


def test_what_is_sent_does_not_grow_with_the_devices():
    """Tests shards that lie far from each other, of which one channel is constant."""
    devices = jax.device_count()
    layer, state = make(C, ("batch", "devices"), approach="batch")
    mesh = jax.make_mesh((devices,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    random = np.random.default_rng(0)
    x = random.standard_normal((devices, 2, C, 3))
    x += 100 * random.standard_normal((devices, 1, C, 1))
    x[:, :, 0] = 0.1
    x = jnp.asarray(x.reshape(2 * devices, C, 3), jnp.float32)
    split = jax.shard_map(
        lambda state, x: forward(layer, state, x, None),
        mesh=mesh,
        in_specs=(WHOLE, SPLIT),
        out_specs=(SPLIT, WHOLE),
    )
    compiled = jax.jit(split).lower(state, x).compile()
    # Each vector as often as there are devices, if these are few: else once there and back.
    whole, padded = C * devices, -(-C // devices) * devices
    few, more = {"all-gather": 4 * whole}, {"all-to-all": 4 * padded, "all-gather": 4 * padded}
    sent = collectives(compiled)
    assert dict(sent) == (few if devices <= 8 else more)
    assert len(sent) <= 2
    y, _ = compiled(state, x)
    exact = np.asarray(x, np.float64)
    centred = exact - exact.mean((0, 2), keepdims=True)
    expected = centred / np.sqrt(exact.var((0, 2), keepdims=True) + layer.eps)
    assert np.abs(y - expected).max() < 2e-6
    assert (np.asarray(y)[:, 0] == 0).all()
