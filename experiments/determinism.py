"""Tests which runs agree to the last bit, and where other runs first differ.

    python -m experiments.determinism           about 10 minutes on 2 cores
    python -m experiments.determinism --quick   under 30 seconds; fails if a claim fails

The script repeats a table of D. Riach's talk "Determinism in Deep Learning" (GTC 2019, S9911)
for JAX. The network of the stability experiment is trained on MNIST several times, each time in
a new process, with probes on weights, layers and gradients; `eqx_norm.determinism.compare`
names the first difference. Runs differ in the seed of NumPy's generator, which shuffles the
images; in threads and cores; in the recipe, `eqx_norm.determinism.deterministic`; in the number
of CPU devices; or in one bit of a weight. At the end, the overhead of probes is measured.
https://developer.nvidia.com/gtc/2019/video/S9911

A last table counts the rows in which rollout and training differ because of a norm alone, in
this package, Equinox, Flax and PyTorch (`common/rollout.py`). Users of PPO see a ratio that is
not 1 before the first update (https://github.com/CarperAI/trlx/issues/107); norms cause it in
https://github.com/vllm-project/vllm/issues/48271 and RL-Align/RL-Kernel#145.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm import BatchNorm, determinism
from eqx_norm.determinism import Ledger, fingerprint, monitor, monitor_module

from .common import mnist, peers, report, rollout, timer, training
from .common.experiment import Experiment, Verdict
from .common.progress import in_threads

SEED, CPU_THREADS = 0, 2  # of the recipe
NO_SEED, SEEDED, THREADS = "no seed", "a seed", "a seed, other threads"
RECIPE, ON_TWO = "the recipe", "the recipe, 2 devices"
DEVICES, FAULT = "the recipe, other devices", "the recipe, one bit flipped"
LAYERS = peers.OURS, peers.EQUINOX, peers.FLAX, peers.TORCH  # of rollout and training


class Run(NamedTuple):
    steps: int
    ledger: str = ""  # the file to write
    seeded: bool = True  # NumPy's global generator
    recipe: bool = False
    threads: int | None = None  # None: as many as cores
    one_core: bool = False
    devices: int = 1
    flipped_at: int | None = None  # the step before which one bit is flipped


def runs_of(quick: bool) -> dict[str, dict[str, Run]]:
    """Returns runs by setting and name; each is compared with the first of its setting."""
    steps, repeats, at = (4, 2, 2) if quick else (100, 5, 37)  # 5 as in the talk
    seeded, recipe = Run(steps), Run(steps, recipe=True)
    names = [f"run {i}" for i in range(1, repeats + 1)]
    on_one_core = {"on one core": recipe._replace(one_core=True)}
    runs = {
        NO_SEED: dict.fromkeys(names, seeded._replace(seeded=False)),
        SEEDED: dict.fromkeys(names, seeded),
        THREADS: {
            f"{n} thread{'s'[: n - 1]}": seeded._replace(threads=n) for n in (2, 1, 3, 4, 8)
        },
        RECIPE: dict.fromkeys(names[:-1], recipe) | on_one_core,
        ON_TWO: dict.fromkeys(names, recipe._replace(devices=2)),
        DEVICES: {
            f"{n} device{'s'[: n - 1]}": recipe._replace(devices=n) for n in (1, 2, 4, 8)
        },
        FAULT: {"as it is": recipe, f"before step {at}": recipe._replace(flipped_at=at)},
    }
    return {name: runs[name] for name in ((NO_SEED, RECIPE, FAULT) if quick else runs)}


def make(network: str, wrap: Any = lambda model: model) -> tuple[Any, eqx.nn.State, Any]:
    """Returns a model, its state and the optimiser state."""
    made = eqx.filter_jit(eqx.nn.make_with_state(training.NETWORKS[network]))
    make_norm = eqx.Partial(BatchNorm, axis_name=training.AXIS, approach="batch")
    model, state = made(make_norm, jax.random.key(SEED))
    model = wrap(model)
    return model, state, training.OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))


def train(run: Run) -> tuple[str, str, str]:
    """Trains; returns the sum of the weights, their fingerprint and the final loss."""
    if run.one_core and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if run.recipe:
        determinism.deterministic(SEED, cpu_threads=CPU_THREADS)
    elif run.seeded:
        np.random.seed(SEED)
    data, size, loss = mnist.load().train, training.BATCH_SIZE, np.nan
    order = np.random.permutation(len(data.labels))  # the global generator, as in many scripts
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
    trained = eqx.filter_shard(make("small"), jax.NamedSharding(mesh, jax.P()))
    step = eqx.filter_jit(determinism.recorded(probed_step))
    with Ledger(run.ledger) as ledger:
        for i in range(run.steps):
            if i == run.flipped_at:
                bits = trained[0].linear2.weight.view(jnp.uint32)
                weight = bits.at[0, 0].set(bits[0, 0] ^ 1).view(jnp.float32)
                trained = eqx.tree_at(lambda of: of[0].linear2.weight, trained, weight)
            chosen = order[i * size : (i + 1) * size]
            batch = mnist.scaled(data.images[chosen]), data.labels[chosen].astype(np.int32)
            batch = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("devices")))
            (trained, loss), record = step(*trained, *batch)
            ledger.append(i, record)
    weights = jax.tree.leaves(eqx.filter(trained[0], eqx.is_inexact_array))
    total = math.fsum(value for leaf in weights for value in np.asarray(leaf, float).flat)
    words = np.asarray(jax.jit(fingerprint)(jax.tree.map(np.asarray, weights))).tolist()
    return repr(total), "".join(f"{word:08x}" for word in words), repr(float(loss))


def probed_step(model: Any, state: Any, memory: Any, images: Any, labels: Any) -> Any:
    """Returns model, state and optimiser state after a step, and its loss."""
    images = monitor(images, "images")

    def loss_of(model: Any) -> Any:
        weights, static = eqx.partition(model, eqx.is_inexact_array)
        monitored = monitor_module(eqx.combine(monitor(weights, "weights"), static))
        loss, (_, _, after) = training.loss_of(monitored, state, images, labels)
        return monitor(loss, "loss"), after

    (loss, state), gradient = eqx.filter_value_and_grad(loss_of, has_aux=True)(model)
    updates, memory = training.OPTIMISER.update(gradient, memory)
    return (eqx.apply_updates(model, updates), state, memory), loss


class Result(NamedTuple):
    setting: str
    run: str
    sum_of_weights: str
    fingerprint: str  # of the weights
    final_loss: str
    parts: str  # the first difference from the first run of the setting, or empty
    by_step: tuple[int, ...]  # numbers of the bits that the probes saw in each step


def start(run: Run) -> Any:
    """Returns the result of `train` in a process with the run's threads and devices."""
    flags = f"--xla_force_host_platform_device_count={run.devices}"
    variables = os.environ | {"JAX_PLATFORMS": "cpu"}
    variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    if run.threads is not None:
        variables["PJRT_NPROC"] = str(run.threads)
    described = json.dumps(run._asdict())
    command = [sys.executable, "-m", "experiments.determinism", "--run", described]
    ended = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True)
    return json.loads(ended.stdout)


def compare(setting: str, runs: dict[str, Run]) -> list[Result]:
    """Returns the results and first differences of the runs."""
    with tempfile.TemporaryDirectory() as folder:
        ledgers = [Path(folder, f"{i}.jsonl") for i in range(len(runs))]
        pairs = zip(runs.values(), ledgers, strict=True)
        recorded = [run._replace(ledger=str(ledger)) for run, ledger in pairs]
        # Bits do not depend on how many runs there are at once.
        outcomes = in_threads(start, recorded, "run", setting)
        rows = [determinism.read(ledger).rows for ledger in ledgers]
        compared = [determinism.compare(ledgers[0], ledger) for ledger in ledgers]
    steps = range(rows[0][-1].step + 1)  # seen: by run and step, the probes' fingerprints
    seen = [[tuple(r.fingerprint for r in of if r.step == i) for i in steps] for of in rows]
    parts = ["" if found.same else found.text.splitlines()[0] for found in compared]
    lines: Any = zip(runs, outcomes, parts, numbered(seen), strict=True)
    return [Result(setting, name, *outcome, *rest) for name, outcome, *rest in lines]


def numbered(runs: list[Any]) -> list[tuple[int, ...]]:
    """Replaces bits, place by place, by numbers in the order of their first occurrence."""
    numbers = [[list(dict.fromkeys(p)).index(x) for x in p] for p in zip(*runs, strict=True)]
    return list(zip(*numbers, strict=True))


class Cost(NamedTuple):
    network: str
    probes: int
    bytes: int  # that leave the device in a step, for all probes
    median: float  # of the time with / without probes, round by round; and percentiles
    low: float
    high: float


def probe(network: str, rounds: int) -> Cost:  # a round's ratio is 0.9 to 1.2
    """Times a training step in which each layer's output and cotangent are monitored, into a
    ledger."""
    images, labels = (array[: training.BATCH_SIZE] for array in mnist.load().train)
    batch = jnp.asarray(mnist.scaled(images)), jnp.asarray(labels, int)
    plain, probed = (*make(network), *batch), (*make(network, monitor_module), *batch)
    step, steps = eqx.filter_jit(determinism.recorded(training.train_step)), itertools.count()
    with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder, "ledger")) as ledger:

        def append() -> Any:
            output, record = step(*probed)
            ledger.append(next(steps), record)
            return output, record

        calls = {"with": append, "without": lambda: training.train_step(*plain)}
        programs = {name: timer.Program(call) for name, call in calls.items()}
        times = timer.interleave(programs, rounds, title=f"probes, {network} network")
    _, record = step(*probed)
    counts = len(record.fingerprints), sum(x.nbytes for x in jax.tree.leaves(record))
    ratios = np.percentile(times["with"] / times["without"], (50, 10, 90)).tolist()
    return Cost(network, *counts, *ratios)


def roll_out(quick: bool) -> list[rollout.Result]:
    """Returns the results of rollout and training, by norm, dtype and layer."""
    lengths, sizes = ((384,), (8,)) if quick else ((384, 768, 1280, 4096), (1, 8, 75))
    norms = peers.LAYER_NORM, peers.RMS_NORM, peers.GROUP_NORM
    layers = peers.present(LAYERS[:2] if quick else LAYERS)
    cases = [*itertools.product(norms, ("float32", "bfloat16"), layers, lengths)]
    found = in_threads(partial(rollout.compare, sizes), cases, "case", "rollouts")
    return [*itertools.chain.from_iterable(found)]


def totals(results: Iterable[rollout.Result]) -> tuple[Any, ...]:
    """Returns the numbers of rows, of rows that differ, and the largest |ratio - 1|."""
    *counts, largest = zip(*(result[5:] for result in results), strict=True)
    return *map(sum, counts), max(largest)


def table_of_rollouts(results: list[rollout.Result]) -> str:
    header = "rollout and training", "dtype", "layer", "rows", "y differs", "dx differs"
    by_layer = itertools.groupby(results, lambda result: result[:3])
    lines = [(*name, *totals(group)) for name, group in by_layer]
    return report.table((*header, "ratio is not 1", "largest |ratio - 1|"), lines)


def sets_of_bits(runs: list[Result]) -> int:
    """Returns the number of different results at the end of the runs."""
    return len({(row.fingerprint, row.final_loss, row.by_step[-1]) for row in runs})


def gave(runs: list[Result]) -> str:
    number = sets_of_bits(runs)
    return f"{len(runs)} runs, {f'{number} sets of' if number > 1 else 'the same'} bits"


def parting(runs: list[Result]) -> str:
    return ", ".join(dict.fromkeys(row.parts for row in runs if row.parts))


def judge_runs(setting: str, runs: list[Result]) -> Verdict:
    number, step = sets_of_bits(runs), runs[-1].run.removeprefix("before ")
    found = parting(runs) == f"{step}: `weights.linear2.weight` forward"
    claim, holds = {
        NO_SEED: ("1. without a seed, every run gives other bits", number == len(runs)),
        SEEDED: ("2. with a seed, runs on one machine give the same bits", number == 1),
        RECIPE: ("3. with the recipe, all cores and one core give the same bits", number == 1),
        ON_TWO: ("4. with the recipe, runs on 2 devices give the same bits", number == 1),
        DEVICES: ("5. other numbers of devices give other bits", number == len(runs)),
        FAULT: ("6. a flipped bit of linear2.weight is found, in the right step", found),
    }[setting]
    return claim, "; ".join(filter(None, (gave(runs), parting(runs)))), holds


def judge_rollouts(results: list[rollout.Result]) -> Verdict:
    rows, y, dx, ratio, _ = totals(row for row in results if row.layer == peers.OURS)
    measured = f"{rows} rows: {y} differ in y, {dx} in dx, in {ratio} the ratio is not 1"
    claim = "7. with eqx-norm no row of y or dx differs, and the ratio is 1"
    return claim, measured, not (y or dx or ratio)


def main() -> int:
    experiment = Experiment("determinism", __doc__, "3 settings of 2 runs, of 4 steps")
    about = "used internally: run one process, with these fields of Run"
    experiment.parser.add_argument("--run", metavar="JSON", help=about)
    if experiment.options.run:
        print(json.dumps(train(Run(**json.loads(experiment.options.run)))))
        return 0

    quick = experiment.options.quick
    results, rollouts = {}, roll_out(quick)  # optimised, before XLA reads the flags
    if quick:  # optimising takes longer than these few steps
        fast = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = fast
    for setting, runs in runs_of(quick).items():
        results[setting] = compare(setting, runs)
    rounds = {"small": 1} if quick else {"small": 100, "large": 100}
    costs = [probe(network, number) for network, number in rounds.items()]
    rows = itertools.chain(*results.values())
    experiment.save_csv(Result._fields, rows)
    experiment.save_csv(Cost._fields, costs, part="overhead")
    experiment.save_csv(rollout.Result._fields, rollouts, part="rollout")
    found = [(name, gave(runs), parting(runs)) for name, runs in results.items()]
    table = report.table(("MNIST", "result", "first difference"), found)
    ratios = [f"{cost.median:.3f} ({cost.low:.2f} to {cost.high:.2f})" for cost in costs]
    times = [(*cost[:3], ratio) for cost, ratio in zip(costs, ratios, strict=True)]
    cost_table = report.table((*Cost._fields[:3], "time with / without probes"), times)
    verdicts = [judge_runs(k, runs) for k, runs in results.items() if k != THREADS]
    verdicts.append(judge_rollouts(rollouts))
    aim = "a step with all probes: at most 1.05 times as long (small; large network)"
    return experiment.publish(
        asked="Do two runs agree to the last bit? "
        "[Riach, GTC 2019](https://developer.nvidia.com/gtc/2019/video/S9911)",
        answer=f"the recipe: {gave(results[RECIPE])}; no seed: {gave(results[NO_SEED])}",
        tables=[table, cost_table, table_of_rollouts(rollouts)],
        verdicts=verdicts,
        goals=[(aim, "; ".join(ratios), "each fingerprint reads its value once more")],
        steps=len(results[RECIPE][0].by_step),
    )


if __name__ == "__main__":
    sys.exit(main())
