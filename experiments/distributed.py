"""Tests whether several processes train as one, restore a checkpoint, and notice a crash.

    python -m experiments.distributed           2 and 4 processes: about 3 minutes on 2 cores
    python -m experiments.distributed --quick   2, under 30 seconds; fails if a claim fails

Each process trains the network of the stability experiment on its part of each batch of MNIST,
on this machine's CPU, and is compared with one process with as many devices. At the end one
process is killed, and fewer processes continue from a checkpoint. Any launcher that JAX knows
(Slurm, Open MPI, Kubernetes) can start the processes:

    srun python -m experiments.distributed --run '{"folder": "/shared/run"}'

https://docs.jax.dev/en/latest/multi_process.html
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax import NamedSharding, P
from tqdm import tqdm

from eqx_norm import BatchNorm

from .common import mnist, report, training
from .common.processes import bits_of, start
from .common.report import Verdict

ONE, SEVERAL, RESTORED = "one process", "several", "restored"
SEED = 0
# The optimiser is SGD. The gradient of a bias before a norm consists of rounding errors, which
# Adam would scale up to whole steps.
LEARNING_RATE = 0.1
DEVICES = "devices"  # the axis of the mesh
# Seconds until JAX notices a dead process, and ends the others (default: 100). This time must
# exceed the longest pause between two heartbeats of a live process.
HEARTBEAT = 10
# The steps are few: after about 20, a rounding error decides the sign of a ReLU's input or the
# pixel that a pooling takes, and runs differ by 1e-4, whatever the layer does.
STEPS = 10


class Run(NamedTuple):
    """Describes a run. All its processes get the same values, except `process`."""

    folder: str  # for the checkpoint and the weights; all processes must reach it
    steps: int = STEPS
    saved_after: int = 5  # the number of steps before the checkpoint
    restored: bool = False  # whether to start from the checkpoint
    killed: bool = False  # whether to kill the last process after the last step
    processes: int | None = None  # None: JAX finds out
    process: int | None = None
    coordinator: str | None = None


def carry_out(run: Run) -> None:
    """Joins the other processes, if there are any, and trains with them."""
    if run.processes != 1:
        # XLA:CPU needs Gloo for communication between processes.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            run.coordinator, run.processes, run.process, heartbeat_timeout_seconds=HEARTBEAT
        )
    try:
        train(run)
    except jax.errors.JaxRuntimeError as error:
        about = f"process {jax.process_index()}: another is gone"
        print(f"{about}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        # A normal exit would wait for all other processes.
        os._exit(1)


def train(run: Run) -> None:
    """Trains, and prints the results to compare, as JSON."""
    mesh = jax.make_mesh(
        (jax.device_count(),), (DEVICES,), axis_types=(jax.sharding.AxisType.Auto,)
    )
    split, whole = NamedSharding(mesh, P(DEVICES)), NamedSharding(mesh, P())
    make = eqx.filter_jit(eqx.nn.make_with_state(training.Small))
    make_norm = partial(BatchNorm, axis_name=(training.AXIS, DEVICES), approach="batch")
    model, state = make(make_norm, jax.random.key(SEED))
    arrays, rest = eqx.partition((model, state), eqx.is_array)
    arrays = jax.device_put(arrays, whole)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(DEVICES), P(DEVICES)), out_specs=P())
    def step(arrays: Any, images: jax.Array, labels: jax.Array) -> Any:
        model, state = eqx.combine(arrays, rest)

        def loss_of(model: Any) -> Any:
            loss, (_, _, after) = training.loss_of(model, state, images, labels)
            return jax.lax.pmean(loss, DEVICES), after

        (loss, state), gradient = eqx.filter_value_and_grad(loss_of, has_aux=True)(model)
        updates = jax.tree.map(lambda g: -LEARNING_RATE * g, gradient)
        trained = eqx.apply_updates(model, updates), state
        return eqx.filter(trained, eqx.is_array), loss

    checkpoint, first, found, batch = Path(run.folder, "checkpoint").absolute(), 0, {}, []
    with ocp.StandardCheckpointer() as checkpointer:
        if run.restored:
            saved = checkpointer.restore(checkpoint, named(arrays))  # over this run's processes
            leaves = map(saved.get, named(arrays))
            arrays = jax.tree.unflatten(jax.tree.structure(arrays), leaves)
            first = run.saved_after
        for i in range(first, run.steps):
            batch = [jax.make_array_from_process_local_data(split, x) for x in part_of_batch(i)]
            arrays, loss = step(arrays, *batch)
            remembered = bits_of(arrays[1])
            found |= {"loss": float(loss), "memory": remembered}
            found.setdefault("first_memory", remembered)
            if i + 1 == run.saved_after and not run.restored:
                checkpointer.save(checkpoint, named(arrays))
                checkpointer.wait_until_finished()
    weights = jax.tree.map(np.asarray, arrays[0])
    if jax.process_index() == 0:
        np.savez(Path(run.folder, "weights.npz"), allow_pickle=False, **named(weights))
    print(json.dumps(found | {"weights": bits_of(weights)}), flush=True)
    if run.killed and jax.process_index() == jax.process_count() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while run.killed:  # the other processes train on
        arrays, loss = step(arrays, *batch)
        jax.block_until_ready(loss)


def part_of_batch(i: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns this process's images and labels of the i-th batch."""
    data = mnist.load().train
    order = np.random.RandomState(SEED + i).permutation(len(data.labels))
    own = np.split(order[: training.BATCH_SIZE], jax.process_count())[jax.process_index()]
    return mnist.scaled(data.images[own]), data.labels[own].astype(np.int32)


def named(arrays: Any) -> dict[str, Any]:
    """Returns the arrays by their paths, which any version of these classes can read."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


class Process(NamedTuple):
    """Holds how one process of a run ended."""

    run: str
    processes: int
    devices: int  # of the run, divided equally among the processes
    process: int
    code: int  # the exit status; negative if killed by a signal
    seconds: float  # from the end of the killed process to the end of this one
    error: float  # of the weights, relative to those of one process
    loss: float  # of the last step
    first_memory: str  # the fingerprint of the running statistics after the first step
    memory: str
    weights: str


def end_of(devices: int, run: Run) -> tuple[int, dict[str, Any], float]:
    """Returns a process's exit status, its printed results, and the time when it ended."""
    return *start("distributed", run, devices, fails=run.killed), time.monotonic()


def run_all(devices: int, steps: int, folder: str) -> list[Process]:
    """Runs one process, several with one killed, and fewer that restore; returns all ends."""
    found = []
    for name, count in ((ONE, 1), (SEVERAL, devices), (RESTORED, devices // 2)):
        of_run = Path(folder, ONE if name == ONE else SEVERAL)  # with the checkpoint
        of_run.mkdir(exist_ok=True)
        with socket.socket() as bound:
            bound.bind(("localhost", 0))
            coordinator = f"localhost:{bound.getsockname()[1]}"  # a free port
        asked = {"steps": steps, "saved_after": steps // 2, "restored": name == RESTORED}
        run = Run(str(of_run), **asked, killed=name == SEVERAL, processes=count)
        runs = [run._replace(process=i, coordinator=coordinator) for i in range(count)]

        with ThreadPoolExecutor(count) as pool:
            ends = list(pool.map(partial(end_of, devices // count), runs))
        paths = of_run / "weights.npz", Path(folder, ONE, "weights.npz")
        with np.load(paths[0]) as ours, np.load(paths[1]) as right:
            errors = [abs(ours[k] - right[k]).max() / abs(right[k]).max() for k in right]
        killed = ends[-1][-1] if run.killed else np.nan
        for i, (code, printed, at) in enumerate(ends):
            columns = name, count, devices, i, code, at - killed, float(np.max(errors))
            found.append(Process(*columns, **printed))
    return found


MARGIN = 5  # seconds beyond HEARTBEAT, to check for the process and report the error
BOUND = 1e-5  # sums in another order differ by 2.5e-7


def same_bits(claim: str, rows: list[Process], *columns: str) -> Verdict:
    """Judges whether rows with the same number of devices agree in these columns."""
    found: dict[int, set[Any]] = {row.devices: set() for row in rows}
    for row in rows:
        found[row.devices].add(tuple(getattr(row, name) for name in columns))
    same = [len(bits) == 1 for bits in found.values()]
    return claim, f"{sum(same)} of {len(same)} numbers of devices", all(same)


def same_weights(claim: str, rows: list[Process]) -> Verdict:
    worst = max(rows, key=lambda row: row.error)
    holds = all(row.error <= BOUND for row in rows)
    return f"{claim}, to {BOUND}", f"{worst.error:.1e} ({worst.devices} devices)", holds


def others_end(rows: list[Process]) -> Verdict:
    others = [row for row in rows if row.code != -signal.SIGKILL]
    late = max(row.seconds for row in others)
    holds = late <= HEARTBEAT + MARGIN and all(row.code for row in others)
    claim = f"4. if one is killed, the others end with an error within {HEARTBEAT + MARGIN} s"
    return claim, f"after {late:.1f} s", holds


def judge(rows: list[Process]) -> list[Verdict]:
    runs = {run: [row for row in rows if row.run == run] for run in (ONE, SEVERAL, RESTORED)}
    bits = "1. all processes have the same weights and statistics, to the bit"
    first = "2. after a step, the statistics are those of one process with as many devices"
    weights = "3. the weights are those of one process with as many devices"
    restored = "5. restored in fewer processes, the weights are those of a whole run"
    return [
        same_bits(bits, runs[SEVERAL], "memory", "weights"),
        same_bits(first, runs[ONE] + runs[SEVERAL], "first_memory"),
        same_weights(weights, runs[SEVERAL]),
        others_end(runs[SEVERAL]),
        same_weights(restored, runs[RESTORED]),
    ]


def main() -> int:
    parser = report.parser("distributed", __doc__, "2 processes, 4 steps")
    about = "run one process, with these fields of Run; for launchers"
    parser.add_argument("--run", metavar="JSON", help=about)
    options, found = parser.parse_args(), []
    if options.run:
        carry_out(Run(**json.loads(options.run)))
        return 0

    counts, steps = (2, 4), STEPS
    if options.quick:  # optimising takes longer than these few steps
        counts, steps = (2,), 4
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    for devices in tqdm(counts, unit="setting", disable=None):
        with tempfile.TemporaryDirectory() as temporary:
            found += run_all(devices, steps, temporary)
    report.save_csv(options.out, "distributed", Process._fields, found, digits=9)
    header = "run", "processes", "devices", "process", "exit code", "error of the weights"
    table = report.table(header, ((*row[:5], f"{row.error:.1e}") for row in found))
    return report.publish(
        options.out,
        "distributed",
        asked="Do several processes train as one does? "
        "[jax.distributed](https://docs.jax.dev/en/latest/multi_process.html)",
        answer=f"{max(counts)} processes: equal weights and statistics, to the bit",
        tables=[table],
        verdicts=judge(found),
        settings={"processes": counts, "steps": steps, "heartbeat": HEARTBEAT},
    )


if __name__ == "__main__":
    sys.exit(main())
