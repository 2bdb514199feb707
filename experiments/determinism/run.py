"""Trains on MNIST with probes: one run of the experiment, in a process of its own.

    python -m experiments.determinism.run RUN LEDGER

`RUN` is a `Run` as JSON. Prints, as JSON, what a run is compared by at a glance: the sum of the
weights, their fingerprint and the final loss. `LEDGER` is written as it goes.
"""

import dataclasses
import json
import operator
import os
import sys
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.typing import NDArray

from eqx_norm import BatchNorm
from eqx_norm.determinism import (
    Ledger,
    deterministic,
    monitor,
    monitor_module,
    recorded,
    summarise,
)
from experiments.lab import mnist
from experiments.lab.networks import Small
from experiments.lab.training import AXIS, BATCH_SIZE, OPTIMISER

SEED = 0
CPU_THREADS = 2  # of the recipe
FLIPPED = "linear2.weight"


@dataclasses.dataclass(frozen=True)
class Run:
    """Says how to run it; `threads`, `cores` and `devices` are those that the run finds."""

    steps: int
    seeded: bool = True  # NumPy's global generator, which shuffles the images
    recipe: bool = False
    threads: int | None = None
    cores: int | None = None
    devices: int | None = None  # None: one, and no sharding
    flipped_at: int | None = None  # the step before which one bit of one weight is flipped


Outcome = tuple[str, str, str]  # sum of weights, their fingerprint, final loss


def environment(run: Run) -> dict[str, str]:
    """Returns the environment of the process: nothing but what makes the machine."""
    variables = os.environ | {"JAX_PLATFORMS": "cpu"}
    for set_by_us in ("XLA_FLAGS", "PJRT_NPROC", "NPROC", "NCCL_NVLS_ENABLE", "PYTHONHASHSEED"):
        variables.pop(set_by_us, None)
    if run.threads is not None:
        variables["PJRT_NPROC"] = str(run.threads)
    if run.devices is not None:
        variables["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={run.devices}"
    return variables


def train(run: Run, ledger: Ledger) -> Outcome:
    """Trains, and appends what the probes saw to the ledger after each step."""

    def make_norm(channels: int) -> BatchNorm:
        return BatchNorm(channels, AXIS, approach="batch")

    model, state = eqx.filter_jit(eqx.nn.make_with_state(Small))(
        make_norm, jax.random.key(SEED)
    )
    optimiser_state = OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))
    trained = model, state, optimiser_state
    batches = _batches(run.steps)
    if run.devices is not None:
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
        cut, whole = (
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
            for axes in (("devices",), ())
        )
        trained = eqx.filter_shard(trained, whole)
        batches = (jax.device_put(batch, cut) for batch in batches)
    step = eqx.filter_jit(recorded(_step))
    loss = None
    for i, (images, labels) in enumerate(batches):
        if i == run.flipped_at:
            where = operator.attrgetter(FLIPPED)
            trained = (eqx.tree_at(where, trained[0], replace_fn=_flipped), *trained[1:])
        (trained, loss), record = step(*trained, images, labels)
        ledger.append(i, record)
    weights = summarise(eqx.filter(trained[0], eqx.is_inexact_array), "weights")
    return repr(weights.total), weights.fingerprint, repr(float(np.asarray(loss)))


def _batches(steps: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int32]]]:
    data = mnist.load().train
    images, labels = mnist.scaled(data.images), data.labels.astype(np.int32)
    # NumPy's global generator, as in many a script.
    order = np.random.permutation(len(labels))
    for i in range(steps):
        chosen = order[i * BATCH_SIZE : (i + 1) * BATCH_SIZE]
        yield images[chosen], labels[chosen]


def _step(
    model: Any, state: eqx.nn.State, optimiser_state: Any, images: Array, labels: Array
) -> Any:
    images = monitor(images, "images")

    def loss_of(model: Any) -> Any:
        weights, rest = eqx.partition(model, eqx.is_inexact_array)
        monitored = monitor_module(eqx.combine(monitor(weights, "weights"), rest))
        forward = jax.vmap(monitored, axis_name=AXIS, in_axes=(0, None), out_axes=(0, 0, None))
        log_probabilities, _, new_state = forward(images, state)
        picked = jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)
        return monitor(-picked.mean(), "loss"), new_state

    (loss, state), gradients = eqx.filter_value_and_grad(loss_of, has_aux=True)(model)
    updates, optimiser_state = OPTIMISER.update(gradients, optimiser_state)
    return (eqx.apply_updates(model, updates), state, optimiser_state), loss


def _flipped(weight: Array) -> Array:
    """Returns it with the last bit of its first element flipped."""
    bits = np.array(weight).view(np.uint32)
    bits[0, 0] ^= 1
    return jnp.asarray(bits.view(np.float32))


def main(described: str, path: str) -> None:
    run = Run(**json.loads(described))
    if run.cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: run.cores])
    if run.recipe:
        deterministic(SEED, cpu_threads=CPU_THREADS)
    elif run.seeded:
        np.random.seed(SEED)
    with Ledger(path) as ledger:
        print(json.dumps(train(run, ledger)))


if __name__ == "__main__":
    main(*sys.argv[1:])
