"""Do several processes train as one does, go on from a checkpoint, and notice a killed one?

    python -m experiments.distributed           2 and 4 processes: about a minute on 2 cores
    python -m experiments.distributed --quick   2, under 30 seconds; fails if a claim fails

Each trains the stability experiment's network on its part of each batch of MNIST, on this
machine's CPU, and is compared with one process of as many devices. In the end one of them is
killed, and fewer go on from a checkpoint. What each runs can be started by any launcher that
JAX knows (Slurm, Open MPI, Kubernetes, https://docs.jax.dev/en/latest/multi_process.html):

    srun python -m experiments.distributed --run '{"folder": "/shared/run"}'
"""

import json
import os
import signal
import socket
import subprocess
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
import optax
import orbax.checkpoint as ocp
from jax import NamedSharding, P
from tqdm import tqdm

from eqx_norm import BatchNorm
from eqx_norm.determinism import summarise

from .common import mnist, report, training
from .common.report import Verdict

ONE, SEVERAL, RESTORED = "one process", "several", "restored"
SEED = 0
# Not Adam: the gradient of a bias before a norm is nothing but rounding errors, which differ by
# the order of a sum, and which Adam scales up to whole steps.
OPTIMISER = optax.sgd(0.1)
DEVICES = "devices"  # the axis of the mesh
# A process that is gone is missed after so many seconds (JAX's default: 100), and ends the
# others. As long as the longest pause between two signs of life of a process that lives.
HEARTBEAT = 10
# Few: later on a rounding error decides the sign of a ReLU's input or which of two pixels a
# pooling takes, and runs part by 1e-4, whatever the layer does (seen after 20 steps).
STEPS = 10


class Run(NamedTuple):
    """Says what a process is to do; all processes of a run are given the same but `process`."""

    folder: str  # of the checkpoint and the weights; all processes reach it
    steps: int = STEPS
    saved_after: int = 5  # so many steps a checkpoint is written
    restored: bool = False  # whether it goes on from there
    killed: bool = False  # whether the last process is killed after the last step
    processes: int | None = None  # None: as JAX finds
    process: int | None = None
    coordinator: str | None = None


# ------------------------------------------------------------------------------ one process


def carry_out(run: Run) -> None:
    """Joins the other processes, if there are any, and trains with them."""
    if run.processes != 1:
        # XLA:CPU alone sends nothing from process to process.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            run.coordinator, run.processes, run.process, heartbeat_timeout_seconds=HEARTBEAT
        )
    try:
        train(run)
    except jax.errors.JaxRuntimeError as error:
        about = f"process {jax.process_index()}: another is gone"
        print(f"{about}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        # As usual it would wait, when it ends, until all others have come to their end, too.
        os._exit(1)


def train(run: Run) -> None:
    """Trains, and prints as JSON what processes and runs are compared by."""
    mesh = jax.make_mesh(
        (jax.device_count(),), (DEVICES,), axis_types=(jax.sharding.AxisType.Auto,)
    )
    split, whole = NamedSharding(mesh, P(DEVICES)), NamedSharding(mesh, P())
    make = eqx.filter_jit(eqx.nn.make_with_state(training.Small))
    make_norm = partial(BatchNorm, axis_name=(training.AXIS, DEVICES), approach="batch")
    model, state = make(make_norm, jax.random.key(SEED))
    memory = OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))
    arrays, rest = eqx.partition((model, state, memory), eqx.is_array)
    arrays = jax.device_put(arrays, whole)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(DEVICES), P(DEVICES)), out_specs=P())
    def step(arrays: Any, images: jax.Array, labels: jax.Array) -> Any:
        model, state, memory = eqx.combine(arrays, rest)

        def loss_of(model: Any) -> Any:
            loss, (_, _, after) = training.loss_of(model, state, images, labels)
            return jax.lax.pmean(loss, DEVICES), after

        (loss, state), gradient = eqx.filter_value_and_grad(loss_of, has_aux=True)(model)
        updates, memory = OPTIMISER.update(gradient, memory)
        trained = eqx.apply_updates(model, updates), state, memory
        return eqx.filter(trained, eqx.is_array), loss

    checkpoint, first, found, batch = Path(run.folder, "checkpoint").absolute(), 0, {}, []
    with ocp.StandardCheckpointer() as checkpointer:
        if run.restored:
            saved = checkpointer.restore(checkpoint, named(arrays))  # over today's processes
            leaves = map(saved.get, named(arrays))
            arrays = jax.tree.unflatten(jax.tree.structure(arrays), leaves)
            first = run.saved_after
        for i in range(first, run.steps):
            batch = [jax.make_array_from_process_local_data(split, x) for x in part_of_batch(i)]
            arrays, loss = step(arrays, *batch)
            remembered = summarise(jax.tree.map(np.asarray, arrays[1]), "").fingerprint
            found |= {"loss": float(loss), "memory": remembered}
            found.setdefault("first_memory", remembered)
            if i + 1 == run.saved_after and not run.restored:
                checkpointer.save(checkpoint, named(arrays))
                checkpointer.wait_until_finished()
    weights = jax.tree.map(np.asarray, arrays[0])
    if jax.process_index() == 0:
        np.savez(Path(run.folder, "weights.npz"), allow_pickle=False, **named(weights))
    print(json.dumps(found | {"weights": summarise(weights, "").fingerprint}), flush=True)
    if run.killed and jax.process_index() == jax.process_count() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while run.killed:  # The others train on.
        arrays, loss = step(arrays, *batch)
        jax.block_until_ready(loss)


def part_of_batch(i: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns this process's images and labels of the i-th batch."""
    data = mnist.load().train
    order = np.random.RandomState(SEED + i).permutation(len(data.labels))
    own = np.split(order[: training.BATCH_SIZE], jax.process_count())[jax.process_index()]
    return mnist.scaled(data.images[own]), data.labels[own].astype(np.int32)


def named(arrays: Any) -> dict[str, Any]:
    """Returns the arrays by where they are, as any version of these classes can read them."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


# ---------------------------------------------------------------------------- all processes


class Process(NamedTuple):
    """Holds how one process of a run ended."""

    run: str
    processes: int
    devices: int  # of the run, as many for each process
    process: int
    code: int  # the negative signal where it was killed
    seconds: float  # from the end of the process that is killed to this one's
    error: float  # of the weights, to those of one process, in units of the largest
    loss: float  # that of the last step
    first_memory: str  # the fingerprint of all that is remembered after its first step
    memory: str
    weights: str


def run_all(devices: int, steps: int, folder: str) -> list[Process]:
    """Returns how all processes ended; what was killed goes on in fewer, of more devices."""
    found = []
    for name, count in ((ONE, 1), (SEVERAL, devices), (RESTORED, devices // 2)):
        of_run = Path(folder, ONE if name == ONE else SEVERAL)  # with the checkpoint
        of_run.mkdir(exist_ok=True)
        with socket.socket() as bound:
            bound.bind(("localhost", 0))
            coordinator = f"localhost:{bound.getsockname()[1]}"  # a port that is free
        asked = {"steps": steps, "saved_after": steps // 2, "restored": name == RESTORED}
        run = Run(str(of_run), **asked, killed=name == SEVERAL, processes=count)
        runs = [run._replace(process=i, coordinator=coordinator) for i in range(count)]
        with ThreadPoolExecutor(count) as pool:
            ended = list(pool.map(start, runs, [devices // count] * count))
        paths = of_run / "weights.npz", Path(folder, ONE, "weights.npz")
        with np.load(paths[0]) as ours, np.load(paths[1]) as right:
            errors = [abs(ours[k] - right[k]).max() / abs(right[k]).max() for k in right]
        killed = ended[-1][1] if run.killed else np.nan
        for i, (code, at, printed) in enumerate(ended):
            how = name, count, devices, i, code, at - killed, float(np.max(errors))
            found.append(Process(*how, **printed))
    return found


def start(run: Run, devices: int) -> tuple[int, float, dict[str, Any]]:
    """Returns a process's exit code, when it ended, and what it printed."""
    given = os.environ.get("XLA_FLAGS", "")
    flags = f"{given} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-m", "experiments.distributed", "--run", json.dumps(run._asdict())],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,  # seconds: then it hangs
    )
    if not done.stdout or (done.returncode and not run.killed):
        raise RuntimeError(f"{run} ended with {done.returncode}:\n{done.stderr}")
    # Before it come Gloo's own lines.
    return done.returncode, time.monotonic(), json.loads(done.stdout.splitlines()[-1])


# --------------------------------------------------------------------------------- verdicts

MARGIN = 5  # seconds beyond HEARTBEAT: until a process is asked for, and the error is told
BOUND = 1e-5  # sums in another order differ by 2.5e-7


def same_bits(claim: str, rows: list[Process], *columns: str) -> Verdict:
    """Judges whether rows of as many devices have the same in these columns."""
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
    claim = f"4. where one is killed, the others end with an error in {HEARTBEAT + MARGIN} s"
    return claim, f"after {late:.1f} s", holds


def judge(rows: list[Process]) -> list[Verdict]:
    runs = {run: [row for row in rows if row.run == run] for run in (ONE, SEVERAL, RESTORED)}
    bits = "1. all processes have the same weights and memory, to the bit"
    first = "2. after a step the memory of one process with as many devices"
    weights = "3. the weights of one process with as many devices"
    restored = "5. restored in fewer processes, the weights of a whole run"
    return [
        same_bits(bits, runs[SEVERAL], "memory", "weights"),
        same_bits(first, runs[ONE] + runs[SEVERAL], "first_memory"),
        same_weights(weights, runs[SEVERAL]),
        others_end(runs[SEVERAL]),
        same_weights(restored, runs[RESTORED]),
    ]


# ------------------------------------------------------------------------------ the command


def main() -> int:
    parser = report.parser("distributed", __doc__, "2 processes, 4 steps")
    parser.add_argument("--run", metavar="JSON", help="be one process: the fields of Run")
    options, found = parser.parse_args(), []
    if options.run:
        carry_out(Run(**json.loads(options.run)))
        return 0

    processes, steps = (2, 4), STEPS
    if options.quick:  # these steps take less time than to make them fast
        processes, steps = (2,), 4
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    with report.unfinished(options.out) as out:
        for devices in tqdm(processes, unit="setting", disable=None):
            with tempfile.TemporaryDirectory() as temporary:
                found += run_all(devices, steps, temporary)
        report.save_csv(out / "results" / "distributed.csv", Process._fields, found, digits=9)
        header = "run", "processes", "devices", "process", "exit code", "error of the weights"
        table = report.table(header, ((*row[:5], f"{row.error:.1e}") for row in found))
        fail = report.publish(
            out,
            "distributed",
            asked="Do several processes train as one does? "
            "[jax.distributed](https://docs.jax.dev/en/latest/multi_process.html)",
            answer=f"{max(processes)} processes: one memory, to the bit",
            tables=[table],
            verdicts=judge(found),
            settings={"processes": processes, "steps": steps, "heartbeat": HEARTBEAT},
        )
    return int(options.quick and fail > 0)


if __name__ == "__main__":
    with report.trouble("distributed"):
        sys.exit(main())
