"""Trains on MNIST as one of several processes, which may be on several hosts.

    python -m experiments.distributed.train RUN

`RUN` is a `Run` as JSON; what it leaves out has its default. `experiments.distributed` starts
it on one machine; so can any launcher that JAX knows (Slurm, Open MPI, Kubernetes, ...): where
`RUN` names no coordinator, `jax.distributed` finds it and the number of processes by itself.

    srun python -m experiments.distributed.train '{"folder": "/shared/run"}'

Each process reads its part of each batch. Prints an `Outcome`, as JSON, and writes the weights
to `folder`. Where another process is gone, it ends with one line and exit code 1.
"""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from eqx_norm import BatchNorm
from eqx_norm.determinism import summarise
from experiments.lab import mnist
from experiments.lab.networks import Small
from experiments.lab.training import AXIS, BATCH_SIZE

# Not Adam: the gradient of a bias before a norm is nothing but rounding errors, which differ by
# the order of a sum, and which Adam scales up to whole steps.
OPTIMISER = optax.sgd(0.1)
SEED = 0
DEVICES = "devices"
CHECKPOINT = "checkpoint"  # in the folder of a run
# A process that is gone is missed after so many seconds (JAX's default: 100), and ends the
# others. As long as the longest pause between two signs of life of a process that lives.
HEARTBEAT = 10


@dataclasses.dataclass(frozen=True)
class Run:
    """Says what a process is to do; all processes of a run are given the same but `process`."""

    folder: str  # of the checkpoint and the weights; all processes reach it
    steps: int = 10
    saved_after: int | None = None  # so many steps a checkpoint is written
    restored: bool = False  # whether it goes on from there
    killed: bool = False  # whether the last process is killed after the last step
    processes: int | None = None  # None: as JAX finds
    process: int | None = None
    coordinator: str | None = None


class Outcome(NamedTuple):
    losses: list[float]
    first_memory: str  # the fingerprint of all that is remembered after its first step
    memory: str
    weights: str


def started(run: Run) -> None:
    """Joins the other processes, if there are any."""
    if run.processes == 1:
        return
    # XLA:CPU alone sends nothing from process to process.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        run.coordinator, run.processes, run.process, heartbeat_timeout_seconds=HEARTBEAT
    )


def train(run: Run) -> None:
    """Trains, and prints what the processes and runs are compared by."""
    mesh = jax.make_mesh((jax.device_count(),), (DEVICES,), axis_types=(AxisType.Auto,))
    split, whole = (NamedSharding(mesh, spec) for spec in (P(DEVICES), P()))

    def make_norm(channels: int) -> BatchNorm:
        return BatchNorm(channels, (AXIS, DEVICES), approach="batch")

    # Compiled as a whole, which takes less time than each of its operations by itself.
    make = eqx.filter_jit(eqx.nn.make_with_state(Small))
    model, state = make(make_norm, jax.random.key(SEED))
    optimiser_state = OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))
    arrays, rest = eqx.partition((model, state, optimiser_state), eqx.is_array)
    arrays = jax.device_put(arrays, whole)
    step = jax.jit(
        jax.shard_map(
            lambda arrays, *batch: _step(arrays, rest, *batch),
            mesh=mesh,
            in_specs=(P(), P(DEVICES), P(DEVICES)),
            out_specs=(P(), P()),
        ),
        donate_argnums=0,
    )
    checkpoint = Path(run.folder, CHECKPOINT).absolute()
    losses, memories, first, batch = [], [], 0, []
    with ocp.StandardCheckpointer() as checkpointer:
        if run.restored:
            arrays, first = _restored(checkpointer, checkpoint, arrays), run.saved_after or 0
        for i in range(first, run.steps):
            batch = [jax.make_array_from_process_local_data(split, part) for part in _part(i)]
            arrays, loss = step(arrays, *batch)
            losses.append(float(loss))
            if i in (first, run.steps - 1):
                memories.append(summarise(jax.tree.map(np.asarray, arrays[1]), "").fingerprint)
            if i + 1 == run.saved_after and not run.restored:
                checkpointer.save(checkpoint, _named(arrays))
                checkpointer.wait_until_finished()
    weights = jax.tree.map(np.asarray, arrays[0])
    if jax.process_index() == 0:
        named: dict[str, Any] = _named(weights)
        np.savez(weights_of(run.folder), allow_pickle=False, **named)
    outcome = Outcome(losses, memories[0], memories[-1], summarise(weights, "").fingerprint)
    print(json.dumps(outcome._asdict()), flush=True)
    if run.killed and jax.process_index() == jax.process_count() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while run.killed:  # The others train on.
        arrays, loss = step(arrays, *batch)
        jax.block_until_ready(loss)


def weights_of(folder: str) -> Path:
    return Path(folder, "weights.npz")


def _part(i: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns this process's part of the i-th batch."""
    data = mnist.load().train
    order = np.random.RandomState(SEED + i).permutation(len(data.labels))[:BATCH_SIZE]
    own = np.split(order, jax.process_count())[jax.process_index()]
    return mnist.scaled(data.images[own]), data.labels[own].astype(np.int32)


def _step(arrays: Any, rest: Any, images: Array, labels: Array) -> Any:
    """Returns the arrays after one step, and its loss, on one device."""
    model, state, optimiser_state = eqx.combine(arrays, rest)

    def loss_of(model: Any) -> Any:
        forward = jax.vmap(model, axis_name=AXIS, in_axes=(0, None), out_axes=(0, 0, None))
        log_probabilities, _, new_state = forward(images, state)
        picked = jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)
        return jax.lax.pmean(-picked.mean(), DEVICES), new_state

    (loss, state), gradients = eqx.filter_value_and_grad(loss_of, has_aux=True)(model)
    updates, optimiser_state = OPTIMISER.update(gradients, optimiser_state)
    trained = eqx.apply_updates(model, updates), state, optimiser_state
    return eqx.filter(trained, eqx.is_array), loss


def _named(arrays: Any) -> dict[str, Array]:
    """Returns the arrays by where they are, as any version of these classes can read them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _restored(checkpointer: ocp.StandardCheckpointer, path: Path, arrays: Any) -> Any:
    """Returns what was saved, laid out over the processes that there are now."""
    like = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in _named(arrays).items()
    }
    restored = checkpointer.restore(path, like)
    return jax.tree.unflatten(jax.tree.structure(arrays), list(map(restored.get, like)))


def main(described: str) -> None:
    run = Run(**json.loads(described))
    started(run)
    try:
        train(run)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        print(f"process {jax.process_index()}: another is gone: {reason}", file=sys.stderr)
        sys.stderr.flush()
        # As usual it would wait, when it ends, until all others have come to their end, too.
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
