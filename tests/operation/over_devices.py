"""Tests that `implementation="device_invariant"` gives one result on 1, 2, 4 and 8 devices.

Run by test_devices.py, in a process that has so many.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.helpers import bits, make

QUANTITIES = ("y", "dweight", "dbias", "dx", "memory")
# So many devices in a mesh, and `jit` with x on several.
WAYS = ("1", "2", "4", "8", "jit")
SEEDS = 3


class Case(NamedTuple):
    shape: tuple[int, ...]
    layer: dict[str, Any]
    dtype: Any = jnp.float32
    masked: bool = False
    inside: bool = False  # whether the gradient is taken inside `shard_map`
    implementation: str = "device_invariant"


CONV = Case((16, 3, 7, 7), {"approach": "batch", "activation": jax.nn.relu})
SMOOTH_GELU = {"approach": "smooth_start", "activation": jax.nn.gelu}
CLIP_SILU = {"approach": "variance_clip", "activation": jax.nn.silu, "unbiased": True}
CASES = {
    "conv": CONV,
    "many values": Case((16, 3, 32, 32), CONV.layer),
    "several channels": Case((16, 8, 16, 16), CONV.layer),
    "dense, one example a device": Case((8, 19), SMOOTH_GELU, inside=True),
    "bf16, mask": Case((24, 4, 9), CONV.layer, jnp.bfloat16, masked=True),
    "f16, mask, one a device": Case((8, 4, 6, 5), CLIP_SILU, jnp.float16, masked=True),
    "dense, mask": Case((40, 33), {"approach": "ema"}, masked=True, inside=True),
}


def program(case, way):
    """Returns a training step, as a function of weight, bias, x, mask, state and dy."""
    devices = int(way) if way.isdigit() else 0
    names = ("batch", "devices") if devices else "batch"
    layer, _ = make(case.shape[1], names, **case.layer, implementation=case.implementation)

    def forward(weight, bias, x, mask, state):
        affine = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))

        def one(x, mask, state):
            return affine(x, state, mask=mask)

        axes = {"in_axes": (0, 0, None), "out_axes": (0, None)}
        return jax.vmap(one, axis_name="batch", **axes)(x, mask, state)

    def step(*arrays, forward=forward):
        *vectors_and_x, mask, state, dy = arrays
        y, pull_back, state = jax.vjp(
            lambda *moving: forward(*moving, mask, state), *vectors_and_x, has_aux=True
        )
        return y, *pull_back(dy), state

    def step_of_a_device(*arrays):
        y, dweight, dbias, dx, state = step(*arrays)
        return y, *jax.lax.psum((dweight, dbias), "devices"), dx, state

    if way == "vmap":
        return jax.jit(step)
    mesh = Mesh(np.array(jax.devices()[: devices or None]), ("devices",))
    d, whole = P("devices"), P()
    inputs = whole, whole, d, d, whole, d
    if way == "jit":
        return jax.jit(step, in_shardings=tuple(NamedSharding(mesh, spec) for spec in inputs))
    over_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    if case.inside:
        outputs = d, whole, whole, d, whole
        return jax.jit(over_mesh(step_of_a_device, in_specs=inputs, out_specs=outputs))
    sharded = over_mesh(forward, in_specs=inputs[:-1], out_specs=(d, whole))
    return jax.jit(functools.partial(step, forward=sharded))


def arguments(case, seed):
    """Returns weight, bias, x, mask or `None`, and dy."""
    random = np.random.default_rng(seed)
    shape, channels = case.shape, case.shape[1]
    x = 10.0**seed + random.standard_normal(shape) * random.uniform(
        0.1, 9, (channels, *shape[2:])
    )
    dy = random.standard_normal(shape) * random.integers(0, 2, shape)
    weight, bias = random.uniform(-1, 1, (2, channels))
    mask = None
    if case.masked:  # in some examples nothing counts, in others all
        share = random.uniform(-0.2, 1.2, (shape[0], *[1] * len(shape[2:])))
        mask = random.uniform(size=(shape[0], *shape[2:])) < share
    x, dy = jnp.asarray(x, case.dtype), jnp.asarray(dy, case.dtype)
    return jnp.float32(weight), jnp.float32(bias), x, mask, dy


def bits_of(case, way):
    """Returns the bits of each quantity, in some training steps one after the other."""
    step = program(case, way)
    _, state = make(case.shape[1], "batch", **case.layer)
    found = []
    for seed in range(SEEDS):
        weight, bias, x, mask, dy = arguments(case, seed)
        # From device to device by way of NumPy.
        results = jax.tree.map(np.asarray, step(weight, bias, x, mask, state, dy))
        state = results[-1]
        for values in jax.tree.leaves(results):
            assert np.isfinite(values.astype(np.float64)).all()
        quantities = zip(QUANTITIES, results, strict=True)
        found.append({name: [*map(bits, jax.tree.leaves(r))] for name, r in quantities})
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_bits(case):
    one_device = bits_of(case, "vmap")
    for way in WAYS:
        for step, right in zip(bits_of(case, way), one_device, strict=True):
            assert [name for name in QUANTITIES if step[name] != right[name]] == [], way


def test_the_normal_mode_does_not_promise_it():
    """Guards the test above, which might pass for other reasons."""
    auto = CONV._replace(implementation="auto")
    assert bits_of(auto, "8") != bits_of(auto, "vmap")


def test_three_devices_hold_no_branches():
    words = "'devices' has 3 devices.*implementation='auto' works with any"
    with pytest.raises(ValueError, match=words):
        bits_of(CONV._replace(shape=(6, 3)), "3")
