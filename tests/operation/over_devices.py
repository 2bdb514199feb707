"""Fingerprints training steps over 1, 2, 4 and 8 devices.

`python -m tests.operation.over_devices` is a program of its own, because the number of CPU
devices is fixed when JAX starts. It prints, as JSON, for each case and quantity the fingerprint
that each way of running it gave.
"""

import hashlib
import json
import sys
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.helpers import make

DEVICES = (1, 2, 4, 8)
QUANTITIES = ("y", "dweight", "dbias", "dx", "memory")
# One device without a mesh, and `jit` with x on several devices and nothing said of it.
WAYS = ("vmap", *map(str, DEVICES), "jit")
SEEDS = 3


class Case(NamedTuple):
    shape: tuple[int, ...]
    approach: str
    activation: Any = None
    dtype: Any = jnp.float32
    masked: bool = False
    unbiased: bool = False
    inside: bool = False  # whether the gradient is taken inside `shard_map`


CASES = {
    "conv": Case((16, 3, 7, 7), "batch", jax.nn.relu),
    "dense, one example a device": Case((8, 19), "smooth_start", jax.nn.gelu, inside=True),
    "bf16, mask": Case((24, 4, 9), "batch", jax.nn.relu, jnp.bfloat16, masked=True),
    # One example a device, of eight.
    "f16, mask": Case((8, 4, 6, 5), "variance_clip", jax.nn.silu, jnp.float16, True, True),
    "dense, mask": Case((40, 33), "ema", None, masked=True, inside=True),
}


def forward(layer: Any) -> Any:
    def f(weight: Any, bias: Any, x: Any, mask: Any, state: Any) -> Any:
        affine = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
        over_batch = jax.vmap(
            lambda x, mask, state: affine(x, state, mask=mask),
            axis_name="batch",
            in_axes=(0, 0, None),
            out_axes=(0, None),
        )
        return over_batch(x, mask, state)

    return f


def step(forward: Any, reduce: Any = lambda gradient: gradient) -> Any:
    def f(weight: Any, bias: Any, x: Any, mask: Any, state: Any, dy: Any) -> Any:
        y, pull_back, state = jax.vjp(
            lambda *moving: forward(*moving, mask, state), weight, bias, x, has_aux=True
        )
        dweight, dbias, dx = pull_back(dy)
        return y, reduce(dweight), reduce(dbias), dx, state

    return f


def programs(case: Case, implementation: str, ways: Any) -> dict[str, Any]:
    def layer(names: Any) -> Any:
        return make(
            case.shape[1],
            names,
            approach=case.approach,
            activation=case.activation,
            unbiased=case.unbiased,
            implementation=implementation,
        )[0]

    made: dict[str, Any] = {"vmap": jax.jit(step(forward(layer("batch"))))}
    d, whole = P("devices"), P()
    for devices in (int(way) for way in ways if way.isdigit()):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("devices",))
        f = forward(layer(("batch", "devices")))
        if case.inside:
            f = step(f, lambda gradient: jax.lax.psum(gradient, "devices"))
            specs = (whole, whole, d, d, whole, d), (d, whole, whole, d, whole)
        else:
            specs = (whole, whole, d, d, whole), (d, whole)
        f = jax.shard_map(f, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
        made[str(devices)] = jax.jit(f if case.inside else step(f))
    batched = NamedSharding(Mesh(np.array(jax.devices()), ("devices",)), d)

    def automatic(weight: Any, bias: Any, x: Any, mask: Any, state: Any, dy: Any) -> Any:
        x, mask, dy = jax.device_put((x, mask, dy), batched)
        return made["vmap"](weight, bias, x, mask, state, dy)

    return {way: automatic if way == "jit" else made[way] for way in ways}


def arguments(case: Case, seed: int) -> tuple[Any, ...]:
    random = np.random.default_rng(seed)
    shape, channels = case.shape, case.shape[1]
    x = 10.0**seed + random.standard_normal(shape) * random.uniform(
        0.1, 9, (channels, *shape[2:])
    )
    dy = random.standard_normal(shape) * random.integers(0, 2, shape)
    weight, bias = random.uniform(-1, 1, (2, channels))
    mask = np.ones((shape[0], *shape[2:]), bool)
    if case.masked:  # in some examples nothing counts, in others all
        mask = random.uniform(size=mask.shape) < random.uniform(-0.2, 1.2, len(mask)).reshape(
            -1, *[1] * (mask.ndim - 1)
        )
    x, dy = jnp.asarray(x, case.dtype), jnp.asarray(dy, case.dtype)
    return jnp.float32(weight), jnp.float32(bias), x, jnp.asarray(mask), dy


def fingerprints(
    case: Case, implementation: str, ways: Any = WAYS
) -> dict[str, dict[str, str]]:
    """Returns those of each quantity by the way of calculating it, one step a seed."""
    hashes = {quantity: {way: hashlib.sha256() for way in ways} for quantity in QUANTITIES}
    for way, program in programs(case, implementation, ways).items():
        _, state = make(case.shape[1], "batch", approach=case.approach)
        for seed in range(SEEDS):
            weight, bias, x, mask, dy = arguments(case, seed)
            *results, state = program(weight, bias, x, mask, state, dy)
            # From device to device by way of NumPy.
            state = jax.tree.map(np.asarray, state)
            results = (*results, jax.tree.leaves(state))
            for quantity, values in zip(QUANTITIES, results, strict=True):
                for value in jax.tree.leaves(values):
                    assert np.isfinite(np.asarray(value, np.float64)).all()
                    hashes[quantity][way].update(np.asarray(value).tobytes())
    return {q: {way: h.hexdigest()[:16] for way, h in of.items()} for q, of in hashes.items()}


def main() -> None:
    found = {name: fingerprints(case, "device_invariant") for name, case in CASES.items()}
    found["of the normal mode"] = fingerprints(CASES["conv"], "auto", ("vmap", "8"))
    try:
        fingerprints(CASES["conv"]._replace(shape=(6, 3)), "device_invariant", ("3",))
    except ValueError as error:
        found["error"] = {"three devices": {"3": str(error)}}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
