"""Trains in one of several processes, which save a checkpoint or continue from one.

Any launcher that JAX detects (Slurm, Open MPI, Kubernetes) can start the processes:

    srun python -m tests.devices.train_in_processes /shared/folder
"""

import argparse
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import NamedSharding, P

from eqx_norm import BatchNorm

STEPS, STEPS_BEFORE_CHECKPOINT, BATCH_SIZE = 10, 5, 64
# Seconds until JAX notices a dead process, and ends the others (default: 100). This time must
# exceed the longest pause between two heartbeats of a live process.
HEARTBEAT = 10


def network(key: Any) -> eqx.nn.Sequential:
    keys = jax.random.split(key)
    norm = BatchNorm(64, ("batch", "devices"), approach="batch", activation=jax.nn.relu)
    layers = eqx.nn.Linear(16, 64, key=keys[0]), norm, eqx.nn.Linear(64, 1, key=keys[1])
    return eqx.nn.Sequential(layers)


def train(folder: Path, restore: bool, kill: bool) -> None:
    """Trains, and prints the statistics after a step, and statistics and weights at the end."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=auto)
    made = eqx.filter_jit(eqx.nn.make_with_state(network))(jax.random.key(0))
    arrays, static = eqx.partition(made, eqx.is_array)
    arrays = jax.device_put(arrays, NamedSharding(mesh, P()))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("devices")), out_specs=P())
    def step(arrays: Any, x: jax.Array) -> Any:
        model, state = eqx.combine(arrays, static)

        def loss_of(model: Any) -> Any:
            axes: Any = {"in_axes": (0, None), "out_axes": (0, None)}
            y, after = jax.vmap(model, axis_name="batch", **axes)(x, state)
            return jax.lax.pmean(jnp.mean((y - jnp.sin(x[:, :1])) ** 2), "devices"), after

        gradient, state = eqx.filter_grad(loss_of, has_aux=True)(model)
        updates = jax.tree.map(lambda g: -0.1 * g, gradient)
        return eqx.filter((eqx.apply_updates(model, updates), state), eqx.is_array)

    def batch(i: int) -> jax.Array:
        """Returns the i-th batch, to which this process contributes its part."""
        x = np.random.RandomState(i).standard_normal((BATCH_SIZE, 16)).astype(np.float32)
        own = np.split(x, jax.process_count())[jax.process_index()]
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P("devices")), own)

    checkpoint, start, first = folder.absolute() / "checkpoint", 0, None
    with ocp.StandardCheckpointer() as checkpointer:
        if restore:
            saved = checkpointer.restore(checkpoint, named(arrays))  # over this run's processes
            leaves = map(saved.get, named(arrays))
            arrays = jax.tree.unflatten(jax.tree.structure(arrays), leaves)
            start = STEPS_BEFORE_CHECKPOINT
        for i in range(start, STEPS):
            arrays = step(arrays, batch(i))
            first = first or values(arrays[1])
            if i + 1 == STEPS_BEFORE_CHECKPOINT:
                checkpointer.save(checkpoint, named(arrays))
                checkpointer.wait_until_finished()
    model, state = map(values, arrays)
    found = {"statistics after a step": first, "statistics": state, "weights": model}
    print(json.dumps(found), flush=True)
    if kill and jax.process_index() == jax.process_count() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while kill:  # the other processes train on
        arrays = jax.block_until_ready(step(arrays, batch(0)))


def named(arrays: Any) -> dict[str, Any]:
    """Returns the arrays by their paths, which any version of these classes can read."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def values(arrays: Any) -> list[float]:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(arrays)]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the checkpoint; all processes reach it")
    parser.add_argument("--restore", action="store_true", help="start from the checkpoint")
    parser.add_argument("--kill", action="store_true", help="kill the last process at the end")
    parser.add_argument("--coordinator", help="host:port; by default JAX asks the launcher")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    options = parser.parse_args()
    # XLA:CPU needs Gloo for communication between processes.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        options.coordinator,
        options.processes,
        options.process,
        heartbeat_timeout_seconds=HEARTBEAT,
    )
    try:
        train(options.folder, options.restore, options.kill)
    except jax.errors.JaxRuntimeError as error:
        about = f"process {jax.process_index()}: another is gone"
        print(f"{about}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        # A normal exit would wait for all other processes.
        os._exit(1)


if __name__ == "__main__":
    main()
