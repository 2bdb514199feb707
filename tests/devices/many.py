"""Counts what a layer sends over so many devices, and how large its program is.

`python -m tests.devices.many` prints, as JSON, the collectives of a forward pass, the number of
the program's instructions, and the errors of its results in units of their largest value.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import make

from . import ways

C = 100  # not a multiple of the number of devices


def main() -> None:
    devices = jax.device_count()
    layer, state = make(C, ("batch", "devices"), approach="batch")
    mesh = jax.make_mesh((devices,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    # Shards far from each other, and one channel that is constant.
    random = np.random.default_rng(0)
    x = random.standard_normal((devices, 2, C, 3)) + 100 * random.standard_normal(
        (devices, 1, C, 1)
    )
    x[:, :, 0] = 0.1
    x = jnp.asarray(x.reshape(2 * devices, C, 3), jnp.float32)

    def forward(state: Any, x: Any) -> Any:
        return ways.forward(layer, state, x, None)

    specs = (ways.WHOLE, ways.SPLIT), (ways.SPLIT, ways.WHOLE)
    split = jax.shard_map(forward, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    compiled = jax.jit(split).lower(state, x).compile()
    y, _ = compiled(state, x)
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean((0, 2), keepdims=True)) / np.sqrt(
        exact.var((0, 2), keepdims=True) + layer.eps
    )
    report = {
        "sent": ways.collectives(compiled),
        "instructions": compiled.as_text().count(" = "),
        "error": float(np.abs(y - exact).max()),
        "constant": float(np.abs(y[:, 0]).max()),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
