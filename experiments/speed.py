"""Times the layers of this package, Equinox, Flax and PyTorch, on a CPU or a GPU.

    python -m experiments.speed                about 30 minutes on 2 cores
    python -m experiments.speed --quick        under 30 seconds; fails if a claim fails
    python -m experiments.speed --device gpu   on a machine with a GPU: make gpu

The script times batch norm with running statistics and a ReLU, forward and backward and in
inference, on the shapes of a ResNet-50, a MobileNetV2 and perceptrons; layer, group and RMS
norm; networks, with their compile times; and forward passes as in serving, compared with
Equinox's and with a copy of x, which reads and writes x once. Before that, it compares the
results of all layers. The ReLU is inside this package's layer (activation=), or after the
layer, as in a model in which only the import is changed. A time is "hot" if the program has
just run, and "cold" if its arrays are in no cache.

Programs take turns, in rounds. PyTorch has a process of its own, because its threads spin after
a call, on the cores that XLA needs next; a process takes its turn when the other is idle.
Numbers are given at percentile 50 of the rounds (and 20). Claims hold at both percentiles: a
difference at only one of them is noise.

On a GPU a layer is timed with XLA's program and with this package's kernels, beside a copy of
x; and 100 calls of a kernel have to give the same bits.

Compare only numbers of the same run, and run nothing else: if another process takes a core,
PyTorch's threads wait for each other for up to 90 ms; the threads of other libraries do not.
Flax and PyTorch are included if they are installed (`make benchmark`).
"""

import functools
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from eqx_norm import BatchNorm, LayerNorm, RMSNorm

from .common import machine, networks, norms_by_hand, peers, report, timer
from .common.exact import Batch
from .common.experiment import Experiment, Goal, Verdict
from .common.peers import EQUINOX, FLAX, OURS, OURS_PALLAS, TORCH
from .common.peers import OURS_SEPARATE as SEPARATE
from .common.progress import progress
from .common.timer import Program, Remote

BATCH_NORM, NETWORK = "batch norm + ReLU", "network"
EXAMPLE_NORMS = LAYER_NORM, GROUP_NORM, RMS_NORM = "LayerNorm", "GroupNorm", "RMSNorm"
INSTANCE_NORM = peers.INSTANCE_NORM
# The shape on which the results of a layer are compared.
COMPARED = {
    BATCH_NORM: "8x64x14x14",
    LAYER_NORM: "256x768",
    GROUP_NORM: "8x64x14x14",
    RMS_NORM: "256x768",
    INSTANCE_NORM: "8x64x14x14",
}
BOTH, INFERENCE, HOT, COLD = "forward + backward", "inference", "hot", "cold"
FORWARD = "forward"  # inference as in serving, in both dtypes, with Equinox only
# The measured quantities.
MS, DEVIATION = "ms", "deviation"
COMPILING, TEMPORARIES = "s to compile", "MB of temporaries"
REPEATED = "calls with other bits, of 100"
OTHERS = (EQUINOX, FLAX, TORCH)  # Equinox in mode "batch", its faster one
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}  # of the largest value: 160 and 12 roundings

# Inputs of the norms for images of 224, as published: channels x height x width.
RESNET_50 = (
    "64x112x112 64x56x56 256x56x56 128x28x28 512x28x28 256x14x14 1024x14x14 512x7x7 2048x7x7"
)
MOBILENET_V2 = (  # without the inputs that ResNet-50 also has
    "32x112x112 16x112x112 96x112x112 96x56x56 24x56x56 144x56x56 144x28x28 32x28x28 192x28x28 "
    "192x14x14 64x14x14 384x14x14 96x14x14 576x14x14 576x7x7 160x7x7 960x7x7 320x7x7 1280x7x7"
)
IMAGES = " ".join(f"32x{image}" for image in f"{RESNET_50} {MOBILENET_V2}".split())
PERCEPTRONS = "256x256 256x1024 1024x512 2048x256 2048x1024"
ODD = "32x768x7x7 48x96x20x20 32x64x17x23"  # the first is a ConvNeXt's
SHAPES = {
    BATCH_NORM: f"{IMAGES} {PERCEPTRONS} {ODD}",
    LAYER_NORM: "64x512 1024x256 1024x1024 8192x1024 6304x384",
    GROUP_NORM: "32x64x56x56 32x256x28x28 32x512x7x7 32x64x17x23",
    RMS_NORM: "64x512 1024x256 1024x1024 8192x1024 6304x384",
}
ROWS = "1x64 8x64 1x768 8x768 64x512 512x384 1024x256 256x768 6304x384 1024x1024 8192x1024"
MAPS = "8x64x7x7 8x64x14x14 32x64x28x28 32x64x56x56 32x256x28x28 32x512x7x7 32x64x17x23"
FORWARDS = {
    LAYER_NORM: ROWS,
    RMS_NORM: ROWS,
    GROUP_NORM: MAPS,
    INSTANCE_NORM: MAPS,
    BATCH_NORM: "256x256 2048x256 8192x256 32x64x14x14 32x192x14x14 32x256x28x28",
}
BY_HAND = "by hand"  # a norm of a few lines, as models have them

_named = {"axis_name": networks.AXIS}
BATCH_NORMS: dict[str, Any] = {
    SEPARATE: functools.partial(BatchNorm, approach="batch", **_named),
    EQUINOX: functools.partial(eqx.nn.BatchNorm, mode="batch", **_named),
}
LAYER_NORMS: dict[str, Any] = {
    SEPARATE: LayerNorm,
    EQUINOX: eqx.nn.LayerNorm,
    BY_HAND: norms_by_hand.LayerNormByHand,
}
RMS_NORMS: dict[str, Any] = {
    SEPARATE: RMSNorm,
    EQUINOX: eqx.nn.RMSNorm,
    BY_HAND: norms_by_hand.RMSNormByHand,
}


# What is timed of a network: its gradients; calls with the model as an argument, as users write
# them; or a scan over the rows of x, in inference.
STEP, CALLS_OF_USERS, DECODING = "step", "calls of users", "decoding"


class Network(NamedTuple):
    """Holds a network to compile with each of several norms.

    **Fields:** `make`: maps a norm to the model; `shape`: of x, a batch; `norms`: by peer;
    `timed`: what is timed, or "".
    """

    make: Any
    shape: tuple[int, ...]
    norms: dict[str, Any]
    timed: str = ""


_with_head_norms = functools.partial(networks.decoder, normalises_heads=True)
NETWORKS = {
    "ResNet-50": Network(networks.resnet_50, (8, 3, 64, 64), BATCH_NORMS, STEP),
    "small CNN": Network(networks.small_cnn, (32, 3, 32, 32), BATCH_NORMS, STEP),
    "perceptron": Network(networks.perceptron, (32, 64), BATCH_NORMS, CALLS_OF_USERS),
    "critic": Network(networks.critic, (256, 17), BATCH_NORMS, CALLS_OF_USERS),
    "ViT": Network(networks.vit, (8, 3, 64, 64), LAYER_NORMS),
    "ViT, RMSNorm": Network(networks.vit, (8, 3, 64, 64), RMS_NORMS),
    "decoder": Network(networks.decoder, (64, 256), LAYER_NORMS, DECODING),
    "decoder, RMSNorm": Network(_with_head_norms, (64, 256), RMS_NORMS, DECODING),
}


class Settings(NamedTuple):
    shapes: dict[str, str] = SHAPES  # by layer: N x C x space, or N x values
    forwards: dict[str, str] = FORWARDS
    dtypes: tuple[str, ...] = ("float32",)
    caches: tuple[str, ...] = (HOT, COLD)
    rounds: int = 10  # fewer for large x (150 MB / its size, at least 5); compilations: 5
    networks: tuple[str, ...] = tuple(NETWORKS)


# Arrays with at least 100 MB in bfloat16: on a GPU launch times are then negligible, and the
# arrays fit into no cache.
LARGE = {
    BATCH_NORM: "256x64x112x112 256x512x28x28 802816x64",
    LAYER_NORM: "65536x1024 65536x768 16384x4096",
    GROUP_NORM: "524288x128",
    RMS_NORM: "65536x1024 65536x768 16384x4096",
    INSTANCE_NORM: "256x256x32x32",
}
GPU = Settings(LARGE, {}, dtypes=tuple(TOLERANCE), caches=("",), networks=())
COPY = "copy of x"  # a peer on a GPU, and in forward passes
QUICK = Settings(
    {BATCH_NORM: "16x64x32x32"}, {LAYER_NORM: "8x64"}, rounds=1, networks=("critic",)
)


Percentiles = NDArray[np.float64]  # 50 and 20 of the rounds, equal for a counted number
Ratio = tuple[Percentiles, str]  # this layer's number / the other's, and the array or network


class Case(NamedTuple):
    layer: str
    shape: str
    dtype: str = "float32"

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(int, self.shape.split("x")))

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * jnp.dtype(self.dtype).itemsize


class Row(NamedTuple):
    """Holds one number of one peer; rows with equal fields before `peer` are compared."""

    layer: str
    shape: str
    dtype: str
    program: str
    cache: str
    unit: str
    peer: str
    values: Percentiles


def drawn(case: Case) -> Batch:
    """Draws x, of mean 0.3, and dy; a weight near 1 and a bias near 0, in float32."""
    normal = np.random.default_rng(0).standard_normal  # in JAX, each shape is compiled
    x, dy = normal((2, *case.sizes), np.float32)
    weight, bias = 0.1 * normal((2, case.sizes[1]), np.float32)
    # The RMS norms of Flax and PyTorch have no bias.
    bias = None if case.layer == RMS_NORM else jnp.asarray(bias)
    x_dy = (jnp.asarray(values, case.dtype) for values in (0.3 + x, dy))
    arrays: Any = *x_dy, jnp.asarray(1 + weight), bias
    return Batch(*arrays)


in_own_process = functools.cache(Remote)


def make(name: str, case: Case, program: str, batch: Batch) -> Program | Remote:
    """Returns a program that computes y, memory and ((dweight, dbias), dx); in inference y."""
    kind, train = None if case.layer == BATCH_NORM else case.layer, program == BOTH
    if name == COPY:
        negative = jax.jit(jnp.negative)
        return Program(lambda: negative(batch.x))
    if name == TORCH:
        device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        arrays = jax.tree.map(np.asarray, batch)
        return in_own_process().make(peers.program_of_torch, kind, arrays, train, device)
    function, arguments = peers.function(kind, name, batch, train=train)
    jitted = jax.jit(function)
    return Program(lambda: jitted(*arguments))


def compare(case: Case, entered: tuple[str, ...]) -> Iterator[Row]:
    """Yields the largest distance of each peer's y and gradients from this layer's."""
    batch = drawn(case)
    if case.layer == BATCH_NORM:
        # The ReLU passes all values of every second channel, and none of the others.
        sign = jnp.where(jnp.arange(case.sizes[1]) % 2, -1, 1)
        batch = batch._replace(bias=20.0 * sign)

    def arrays(name: str) -> Iterator[Any]:
        for values in make(name, case, BOTH, batch).answer():
            yield np.moveaxis(values, -1, 1) if name == FLAX and values.ndim > 2 else values

    answers = {name: [*arrays(name)] for name in entered}
    for name, answer in answers.items():
        pairs = [*zip(answer, answers[OURS], strict=True)]
        distances = [np.abs(theirs - y).max() / np.abs(y).max() for theirs, y in pairs]
        largest = float(np.nan_to_num(np.max(distances), nan=math.inf))
        yield measured(largest, *case, BOTH, "", DEVIATION, name)


def race(
    case: Case, program: str, entered: tuple[str, ...], settings: Settings
) -> Iterator[Row]:
    """Yields the times of all peers on one array."""
    given = drawn(case)
    made = {name: make(name, case, program, given) for name in entered}
    if (kernel := made.get(OURS_PALLAS)) is not None:
        yield measured(differences(kernel), *case, program, "", REPEATED, OURS_PALLAS)
    rounds = min(settings.rounds, max(5, 150_000_000 // case.bytes))
    for cache in settings.caches:
        title = f"{case.shape} {cache}"
        taken = timer.interleave(made, rounds, cold=cache == COLD, title=title)
        for name, ms in taken.items():
            yield measured(ms, *case, program, cache, MS, name)


def differences(program: Any, calls: int = 100) -> int:
    """Returns the number of calls that do not give the bits of the first call."""
    same = jax.jit(lambda a, b: jnp.array(jax.tree.leaves(jax.tree.map(jnp.array_equal, a, b))))
    first = program.call()
    return sum(not same(first, program.call()).all() for _ in range(calls - 1))


def measured(rounds: Any, *where: Any) -> Row:
    """Returns a row of percentiles over the rounds, or of a number that was counted."""
    return Row(*where, values=np.percentile(rounds, (50, 20)))


def run_network(network: str, settings: Settings) -> Iterator[Row]:
    """Yields the compile time of a network, and its times and memory if the network is run.

    Only the norm differs, as in a model in which only the import is changed.
    """
    make_network, shape, norms, timed = NETWORKS[network]
    where = NETWORK, "x".join(map(str, shape)), "float32"
    make_step = networks.decoding if timed == DECODING else networks.gradient_step
    steps = {name: make_step(make_network, norms[name], shape) for name in norms}
    found = timer.compile_in_turns(steps, min(5, settings.rounds))
    for name, each in found.items():
        yield measured(each.seconds, *where, network, "", COMPILING, name)
        if timed in (STEP, CALLS_OF_USERS):
            yield measured(each.temporaries / 1e6, *where, network, "", TEMPORARIES, name)
    if not timed:
        return
    if timed == CALLS_OF_USERS:
        calls = {name: networks.uses(make_network, norms[name], shape) for name in norms}
    else:
        use = BOTH if timed == STEP else f"inference of {shape[0]} rows"
        calls = {
            name: {use: functools.partial(found[name].call, *steps[name][1])} for name in norms
        }
    for use in calls[EQUINOX]:
        made = {name: Program(calls[name][use]) for name in norms}
        taken = timer.interleave(made, settings.rounds, title=network)
        for name, ms in taken.items():
            yield measured(ms, *where, f"{network}, {use}", HOT, MS, name)


WAYS = {
    "separate ReLU": (BATCH_NORM, BOTH, SEPARATE),
    "activation=": (BATCH_NORM, BOTH, OURS),
    "inference": (BATCH_NORM, INFERENCE, OURS),
    **{norm: (norm, BOTH, OURS) for norm in EXAMPLE_NORMS},
    **{f"{norm} inference": (norm, INFERENCE, OURS) for norm in EXAMPLE_NORMS},
}


def chosen(rows: list[Row], **fields: Any) -> list[Row]:
    return [row for row in rows if all(getattr(row, k) == v for k, v in fields.items())]


def both(values: Percentiles, form: str = ".2f") -> str:
    """Returns "2.34 (2.30)": percentile 50, and percentile 20 unless they are equal."""
    median, low = (f"{value:{form}}" for value in values)
    return median if values[0] == values[1] else f"{median} ({low})"


def ratios(rows: list[Row], other: str, ours: str = OURS) -> list[Ratio]:
    """Returns, for each array or network, this layer's numbers divided by the other's, and its
    name."""
    theirs = {row[:6]: row.values for row in rows if row.peer == other}
    return [
        (
            row.values / theirs[row[:6]],
            row.program if row.layer == NETWORK else f"{row.shape} {row.dtype} {row.cache}",
        )
        for row in rows
        if row.peer == ours and row[:6] in theirs
    ]


def mean(among: list[Ratio]) -> Percentiles:
    """Returns the geometric mean of this layer's time / the other's."""
    return np.exp(np.mean([np.log(ratio) for ratio, _ in among], axis=0))


def means(rows: list[Row], other: str, ways: int = len(WAYS)) -> dict[str, Percentiles]:
    """Returns geometric means of this layer's time / the other's, by way and cache."""
    found = {}
    for cache, way in itertools.product((COLD, HOT, ""), list(WAYS)[:ways]):
        layer, program, ours = WAYS[way]
        where = {"layer": layer, "program": program, "cache": cache, "unit": MS}
        if among := ratios(chosen(rows, dtype="float32", **where), other, ours):
            found[f"{way}, {cache}".strip(", ")] = mean(among)
    return found


def joined(by_way: dict[str, Percentiles]) -> str:
    return "; ".join(f"{way}: {both(values)}" for way, values in by_way.items())


def judge(rows: list[Row], settings: Settings) -> list[Verdict]:
    """Returns the verdicts; without the full settings, only those that need no timings."""
    worst = {
        r.dtype: r for r in sorted(chosen(rows, unit=DEVIATION), key=lambda r: r.values[0])
    }
    same = "1. all timed layers compute the same: float32 to 1e-5, bfloat16 to 0.05"
    measured = ", ".join(f"{r.dtype} to {r.values[0]:.1e} ({r.peer})" for r in worst.values())
    holds = all(row.values[0] <= TOLERANCE[row.dtype] for row in worst.values())
    verdicts = [(same, measured, holds)]
    if shares := ratios(chosen(rows, unit=TEMPORARIES), EQUINOX, SEPARATE):
        little = "2. a network's step needs no more temporary memory than with Equinox's norm"
        measured = f"{', '.join(both(share) for share, _ in shares)} of its bytes"
        verdicts.append((little, measured, all(share.max() <= 1 for share, _ in shares)))
    if repeated := chosen(rows, unit=REPEATED):
        other = sum(row.values[0] for row in repeated)
        same = f"2. {OURS_PALLAS}: 100 calls give the same bits"
        verdicts.append(
            (same, f"{other:.0f} others, {len(repeated)} programs", bool(other == 0))
        )
    if settings != Settings():
        return verdicts
    over_shapes = f"{BATCH_NORM}, geometric mean over the shapes"
    faster = {
        f"{number}. {over_shapes}: {other} takes longer": means(rows, other, 2)
        for number, other in enumerate(OTHERS, 3)
    }
    what = "LayerNorm, GroupNorm, RMSNorm, forward + backward, mean over shapes"
    faster[f"6. {what}: Equinox takes longer"] = {
        way: value
        for way, value in means(rows, EQUINOX).items()
        if way.partition(",")[0].endswith("Norm")
    }
    timed = ((claim, by_way) for claim, by_way in faster.items() if by_way)
    verdicts += [(claim, joined(m), bool(max(map(max, m.values())) < 1)) for claim, m in timed]
    return verdicts


# Goals, and their known limits: docs/design.md, "Limits".
PAGES = "every call gets new memory pages for large arrays, with every layer"
CALLS = "small arrays: a call runs about ten loops; [N, C]: not known"
RAGGED = "rows of 7 or 14 values: XLA's loops follow the axes of a fusion's output"
ONE_LOOP = "both are one loop over x; here one subtraction more"
SUMS = "both read x twice; here sums are right at any mean"
TWICE = "the forward pass reads x twice"
INFERRED = "inference: Python makes three named tuples for each layer and call"
TREES = "loops of sums are compiled, Equinox's are a library's; tracing a layer, once"
FACTORS = {EQUINOX: (0.4, PAGES), FLAX: (0.77, RAGGED), TORCH: (0.83, CALLS)}
LARGEST = (  # bounds for this layer's time / the other's, on every array
    (BATCH_NORM, BOTH, 1.1, TORCH, CALLS),
    (BATCH_NORM, INFERENCE, 1.0, EQUINOX, ONE_LOOP),
    *((layer, FORWARD, 1.03, EQUINOX, SUMS) for layer in FORWARDS),
    (LAYER_NORM, BOTH, 1.5, TORCH, TWICE),
)
# The aim is at most the other norm's number, in every network.
NORMS = {EQUINOX: "with Equinox's norm", BY_HAND: "with a norm by hand"}
OF_NETWORKS = ((MS, "time", INFERRED), (COMPILING, "compile time", TREES))


def goals(rows: list[Row]) -> list[Goal]:
    """Returns the goals, their measurements, and their limits."""
    found = []
    for other, (factor, limit) in FACTORS.items():
        aim = f"{BATCH_NORM}: at most {factor} of {other}'s time"
        found.append((aim, joined(means(rows, other, 2)), limit))
    for layer, program, most, other, limit in LARGEST:
        if mine := ratios(chosen(rows, layer=layer, program=program, unit=MS), other):
            aim = f"{layer}, {program}, on any array: at most {most} of {other}'s time"
            worst, where = largest(mine)
            beyond = sum(ratio.min() > most for ratio, _ in mine)
            said = (
                f"{both(worst)} on {where}; more at both percentiles: {beyond} of {len(mine)}"
            )
            if copied := by_copy(chosen(rows, layer=layer, program=program), where, OURS):
                said += f"; {copied} of the time of a {COPY}"
            found.append((aim, said, limit))
    for unit, quantity, limit in OF_NETWORKS:
        for other in (EQUINOX, BY_HAND):
            mine = ratios(chosen(rows, layer=NETWORK, unit=unit), other, SEPARATE)
            said = "; ".join(f"{name}: {both(ratio)}" for ratio, name in mine)
            found.append(
                (f"networks: at most 1.0 of the {quantity} {NORMS[other]}", said, limit)
            )
    return [goal for goal in found if goal[1]]


def largest(among: list[Ratio]) -> Ratio:
    """Returns the ratio whose smaller percentile is the largest: both percentiles reach it."""
    return max(among, key=lambda ratio: ratio[0].min())


def a_dozen(rows: list[Row]) -> dict[str, list[Row]]:
    """Returns the times of about a dozen shapes, ordered by size, for tables and figures."""
    where = {"layer": BATCH_NORM, "program": BOTH, "dtype": "float32", "unit": MS}
    shown = [row for row in chosen(rows, **where) if row.cache != HOT]
    shapes = sorted({row.shape for row in shown}, key=lambda s: (Case(BATCH_NORM, s).bytes, s))
    return {s: chosen(shown, shape=s) for s in shapes[:: math.ceil(len(shapes) / 12)]}


def by_peer(title: str, lines: dict[str, list[Row]]) -> str:
    """Returns a table of values with a column for each peer."""
    names = dict.fromkeys(row.peer for rows in lines.values() for row in rows)
    cells = []
    for line, rows in lines.items():
        found = {row.peer: both(row.values, "#.3g") for row in rows}
        cells.append([line, *(found.get(name, "") for name in names)])
    return report.table((title, *names), cells)


def forward_table(rows: list[Row]) -> str:
    """Returns the table of forward passes: mean and largest ratios over the shapes, and times
    relative to a copy of x on the array of the largest."""
    lines = []
    for layer, dtype in itertools.product(FORWARDS, TOLERANCE):
        of_layer = chosen(rows, layer=layer, dtype=dtype, program=FORWARD)
        if among := ratios(of_layer, EQUINOX):
            worst, array = largest(among)
            copies = (by_copy(of_layer, array, name) for name in (OURS, EQUINOX))
            found = both(mean(among)), both(worst), array.split()[0], *copies
            lines.append((f"{layer}, {dtype}", *found))
    header = "forward, time of eqx-norm / time of Equinox", "mean", "largest", "on"
    return report.table((*header, f"eqx-norm / {COPY}", f"Equinox / {COPY}"), lines)


def by_copy(rows: list[Row], array: str, name: str) -> str:
    """Returns the time of a layer / that of a copy of x, on an array that `ratios` names."""
    return next((both(ratio) for ratio, of in ratios(rows, COPY, name) if of == array), "")


def beside_copies(rows: list[Row]) -> str:
    """Returns the table of times on a GPU, relative to a copy of x."""
    lines: dict[Any, dict[str, Percentiles]] = {}
    for row in chosen(rows, unit=MS):
        lines.setdefault(row[:4], {})[row.peer] = row.values
    peers_ = [*dict.fromkeys(row.peer for row in chosen(rows, unit=MS) if row.peer != COPY)]
    cells = []
    for of, taken in lines.items():
        relative = (both(taken[p] / taken[COPY]) if p in taken else "" for p in peers_)
        cells.append((", ".join(of), f"{taken[COPY][0]:#.3g}", *relative))
    return report.table(("time / time of a copy of x", "copy, ms", *peers_), cells)


def tables(rows: list[Row]) -> list[str]:
    of_others = {other: found for other in OTHERS if (found := means(rows, other))}
    ways = next(iter(of_others.values()))
    lines = [(way, *(both(found[way]) for found in of_others.values())) for way in ways]
    header = ("time of eqx-norm / time of: percentile 50 (20)", *of_others)
    made = [report.table(header, lines)]
    made += [forward_table(rows)] if chosen(rows, program=FORWARD) else []
    if chosen(rows, peer=COPY, cache=""):  # on a GPU
        return [*made, beside_copies(rows)]
    made += [by_peer(f"ms, {BATCH_NORM}, {BOTH}, cold", a_dozen(rows))]
    of_networks: dict[str, list[Row]] = {}
    for row in chosen(rows, layer=NETWORK):
        of_networks.setdefault(f"{row.program}, {row.unit}", []).append(row)
    return [*made, by_peer("networks", of_networks)] if of_networks else made


def draw(rows: list[Row]) -> Figure:
    """Draws the times of other layers / this layer's time, by shape."""
    lines = a_dozen(rows)
    figure = report.figure(7, 1.6 + 0.28 * len(lines))
    axes = figure.subplots()
    for name, marker in zip((OURS, SEPARATE, *OTHERS), "ooD^s", strict=True):
        color = peers.COLOURS[name]
        look: Any = {"color": color, "markerfacecolor": "white" if name == SEPARATE else color}
        for place, shown in enumerate(lines.values()):
            unit = chosen(shown, peer=OURS)[0].values
            for row in chosen(shown, peer=name):
                ratio = row.values / unit
                axes.plot(ratio[0], place, marker, label=name, **look)
                axes.hlines(place, *ratio, color=color, linewidth=0.8)
    axes.set_yticks(range(len(lines)), list(lines))
    report.log_scale(axes, "x", (1, 2, 3, 5))
    axes.set(xlabel=f"time / time of {OURS} (activation=)", title=f"{BATCH_NORM}, {BOTH}, cold")
    report.legend_below(figure)
    return figure


def main() -> int:
    experiment = Experiment("speed", __doc__, "1 array, 1 round")
    parser, about = experiment.parser, "where to measure (default: cpu)"
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help=about)
    on_gpu = experiment.options.device == "gpu"
    settings = GPU if on_gpu else Settings()
    if experiment.options.quick:
        settings = QUICK
    jax.config.update("jax_enable_compilation_cache", False)  # compiling is timed
    own = (OURS, SEPARATE)
    if not on_gpu:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() == "gpu":
        own = (OURS, SEPARATE, OURS_PALLAS)
        experiment.name = f"speed_{machine.device_name()}"
    else:
        parser.error("--device gpu: JAX finds no GPU; on a machine with one, run make gpu")

    entered, steps = peers.present((*own, *OTHERS)), []
    for layer, small in COMPARED.items():
        names = tuple(name for name in entered if name != SEPARATE or layer == BATCH_NORM)
        if layer == INSTANCE_NORM:
            names = tuple(name for name in names if name in (*own, EQUINOX))
        # No kernel serves groups of 14x14 values.
        is_served = layer not in (GROUP_NORM, INSTANCE_NORM)
        compared = tuple(name for name in names if is_served or name != OURS_PALLAS)
        steps += [(compare, Case(layer, small, dtype), compared) for dtype in TOLERANCE]
        shapes = settings.shapes.get(layer, "").split()
        for grid in itertools.product(settings.dtypes, shapes, (BOTH, INFERENCE)):
            dtype, shape, program = grid
            racing = (*names, COPY) if on_gpu else names
            steps.append((race, Case(layer, shape, dtype), program, racing, settings))
    serving = settings._replace(caches=(HOT,), rounds=2 * settings.rounds)
    for layer, shapes in settings.forwards.items():
        for dtype, shape in itertools.product(TOLERANCE, shapes.split()):
            names = OURS, EQUINOX, COPY
            steps.append((race, Case(layer, shape, dtype), FORWARD, names, serving))
    steps += [(run_network, network, settings) for network in settings.networks]
    rows: list[Row] = []
    for measure, *given in progress(steps, "step"):
        rows += measure(*given)
    header = (*Row._fields[:-1], "percentile 50", "percentile 20")
    experiment.save_csv(header, [(*row[:-1], *row.values) for row in rows])
    experiment.save_figure(draw(rows))
    beside = {p: [*means(rows, p).values()] for p in OTHERS if p in entered}
    said = ", ".join(f"{other} {found[0][0]:.2f}" for other, found in beside.items())
    return experiment.publish(
        asked="How fast are the layers compared with Equinox, Flax and PyTorch?",
        answer=f"batch norm + ReLU, mean time of eqx-norm / time of {said}",
        tables=tables(rows),
        verdicts=judge(rows, settings),
        goals=goals(rows) if settings == Settings() else [],
        settings=settings._asdict(),
        environment=machine.environment("torch"),  # in a process of its own
    )


if __name__ == "__main__":
    sys.exit(main())
