"""Counts the memory traffic of the layers on an H200 or a TPU v5e, in compiled programs.

    make gpu-compile-check, make tpu-compile-check  all of it, without a device (6 minutes each)
    python -m experiments.compiled                  the same, if jax's plugin is installed
    python -m experiments.compiled --quick          a few programs, under 30 seconds

On these devices, the bytes read and written determine the time of a normalisation. XLA compiles
for a device from its description, and the program shows the traffic, here in units of the bytes
of x: for a batch norm at least 3 forward and 5 backward. Nothing runs. If y and its cotangent
are known together ("forward + backward"), XLA saves a read of x, which is impossible in
training ("forward, then backward"). With frozen weights only x has a gradient. "eqx-norm" is
compiled by XLA, "eqx-norm, pallas" uses this package's kernels. In a program that `jax.jit`
splits over 8 devices, shape and unit are those of a device's shard of x. docs/gpu.md has
conclusions.
"""

import functools
import importlib.util
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from eqx_norm import BatchNorm
from eqx_norm.models import recompute_outputs

from .common import machine, networks, peers, report, traffic
from .common.exact import EPS
from .common.experiment import Experiment, Goal, Verdict
from .common.peers import EQUINOX, OURS, OURS_PALLAS, OURS_SEPARATE
from .common.progress import in_threads, progress

Row = dict[str, Any]
GPU, TPU = "gpu", "tpu"
DEVICE = {GPU: "H200", TPU: "TPU v5e"}
PLUGIN = {GPU: "jax_cuda12_plugin", TPU: "libtpu"}
FORWARD, BOTH, APART = "forward", "forward + backward", "forward, then backward"
FROZEN, OF_X, INFERENCE = "forward + gradient of x", "gradient of x", "inference"
DIRECTIONS = (FORWARD, BOTH, APART, FROZEN, OF_X, INFERENCE)
RELU, BETWEEN = "BatchNorm + ReLU", "conv, BatchNorm + ReLU, conv"
ALONE = {RELU: jax.nn.relu, "BatchNorm + GELU": jax.nn.gelu, "BatchNorm + SiLU": jax.nn.silu}
SINGLE = LAYER, RMS, GROUP, INSTANCE = "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"
CHANNEL, OF_ROWS = peers.CHANNEL_NORM, (LAYER, RMS)
PALLAS = (OURS_PALLAS,)
NO_NORM, MASKED, TWO = "no norm", "eqx-norm, masks", (OURS, EQUINOX)
DTYPES, LAYERS = ("bfloat16", "float32"), (OURS, OURS_PALLAS, OURS_SEPARATE, EQUINOX)
# Vectors, images, rows. XLA would keep an x of less than 128 MB in the fast memory of a TPU.
DENSE, IMAGES, ROWS = (65536, 256), ((64, 64, 32, 32),), ((65536, 256), (16384, 1024))
LONG = DENSE, *IMAGES
LARGE = (256, 64, 112, 112), (256, 256, 56, 56), (256, 512, 28, 28)
SHAPES = {GPU: (DENSE, IMAGES, ROWS), TPU: ((524288, 512), LARGE, ((131072, 2048),))}
# Shapes of a ResNet-50, with the channels last as convolutions return them on a GPU.
COLUMNS = (DENSE, (802816, 64), (6272, 1024), (1568, 2048))
# The first and the last shape of a ConvNeXt-T.
CONVNEXT = (256, 96, 56, 56), (2048, 768, 7, 7)
CASE = ("program", "shape", "direction", "layer", "dtype")  # every combination is compiled
GRIDS: dict[str, tuple[Any, ...]] = {
    target: (
        ((RELU,), (vectors, images[0]), DIRECTIONS, TWO),
        (OF_ROWS, rows, DIRECTIONS[:5], TWO),
        ((GROUP,), (*images, vectors), DIRECTIONS[:5], TWO),
        ((INSTANCE,), images[:1], DIRECTIONS[:5], TWO),
        ((RELU, GROUP, INSTANCE), images[:1], (FORWARD, BOTH), (MASKED,)),
        ((RELU,), (vectors, images[0]), DIRECTIONS[:3], (OURS_SEPARATE,)),
        ((CHANNEL,), CONVNEXT, DIRECTIONS[:5], TWO),
    )
    for target, (vectors, images, rows) in SHAPES.items()
}
GRIDS[GPU] += (
    (ALONE, LONG, (BOTH,), (OURS, OURS_PALLAS)),
    ((BETWEEN,), IMAGES, (BOTH,), (NO_NORM, *LAYERS)),
    ((RELU,), (*COLUMNS, *IMAGES), (FORWARD, APART), (OURS_PALLAS,)),
    ((RELU,), COLUMNS[3:], (FORWARD, APART), TWO),
)
GRIDS[GPU] += tuple(
    ((norm,), shapes, (FORWARD, APART), PALLAS)
    for norm, shapes in ((LAYER, ROWS), (RMS, ROWS), (GROUP, (DENSE,)), (INSTANCE, IMAGES))
)
# The lengths of rows of real networks.
LENGTHS = (192, 320, 384, 768, 1152, 1280, 1536, 3072, 5120)
GRIDS[GPU] += ((OF_ROWS, tuple((16384, n) for n in LENGTHS), (FORWARD, OF_X), TWO),)
GRIDS[TPU] += ((OF_ROWS, SHAPES[TPU][2], DIRECTIONS[:5], (OURS_PALLAS,)),)
# Programs that `jit` splits over a mesh, with shapes of a device's shard of x. Along the second
# axis of a mesh, rows or channels are split.
MANY, MESH, CHIPS = (8,), (2, 4), (4,)
SPLIT: dict[str, tuple[Any, ...]] = {
    GPU: (
        ((MANY,), OF_ROWS, ((4096, 1280), (8192, 768), (16384, 192)), (OURS, OURS_PALLAS)),
        ((MANY,), (GROUP,), ((16, 320, 32, 32), (16, 96, 24, 40)), (OURS,)),
        ((MANY,), (INSTANCE,), ((16, 64, 64, 64),), (OURS,)),
        ((MANY, MESH), (RELU,), ((8192, 256), (4096, 1024), (32, 256, 28, 28)), (OURS,)),
        ((MESH,), OF_ROWS, ((4096, 1280),), (OURS,)),
        ((MESH,), (GROUP,), ((16, 320, 32, 32),), (OURS,)),
    ),
    TPU: (
        ((CHIPS,), OF_ROWS, SHAPES[TPU][2], (OURS,)),
        ((CHIPS,), (GROUP, INSTANCE, RELU), LARGE[:1], (OURS,)),
        ((CHIPS,), (RELU,), SHAPES[TPU][:1], (OURS,)),
    ),
}
OF_MESH = "mesh", "units", "one device", f"{EQUINOX}, on the mesh", "sent"
UNITS = {name: f"{name}, MB" for name in ("kept", "temporaries", "moved")}  # in tables
MAPPED: Any = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}


def described(target: str) -> Sequence[Any]:
    """Returns the descriptions of 8 GPUs or 4 TPUs, none of which has to be there."""
    # Without these variables libtpu looks for a TPU over the network, and serves one process.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "true"
    if target == TPU:
        how: Any = {"topology_name": "v5e:2x2", "chips_per_host_bounds": [2, 2, 1]}
        return topologies.get_topology_desc(platform=TPU, **how).devices
    h200 = (Path(__file__).with_name("data") / "h200.txtpb").read_text()
    how = {"target_config": h200, "topology": "1x1x8"}
    return topologies.get_topology_desc(platform="cuda", **how).devices


def build(
    devices: Sequence[Any], f: Any, *arguments: Any, split: int = 0, parts: int = 1
) -> tuple[Any, float]:
    """Compiles a function for arrays like these; returns the program, and the processor time of
    lowering and compiling. Arrays with `split` axes are split over the devices along the first
    axis, and along the second into `parts`."""
    auto = (AxisType.Auto, AxisType.Auto)
    mesh = Mesh(np.reshape([*devices], (-1, parts)), ("rows", "parts"), axis_types=auto)
    spec = jax.P("rows", "parts") if parts > 1 else jax.P("rows")

    def placed(leaf: Any) -> Any:
        is_split = split > 0 and leaf.ndim == split
        sharding = NamedSharding(mesh, spec if is_split else jax.P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    given = jax.tree.map(placed, arguments)
    # Autotuning of convolutions is off, because it needs a GPU.
    options: Any = None if devices[0].platform == TPU else {"xla_gpu_autotune_level": "0"}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced, start = jax.jit(f).trace(*given), time.process_time()
        program = traced.lower().compile(compiler_options=options)
        return program, time.process_time() - start


def norm_of(program: str, layer: str, shape: Any) -> peers.Layer:
    """Returns a norm, and its activation if the program has one."""
    channels, relu = shape[1], ALONE.get(program, jax.nn.relu)
    if program in (*SINGLE, CHANNEL):
        groups = min(32, channels // 8)
        return peers.example_norm(program, layer, shape[1:], eps=EPS, groups=groups)
    if layer == NO_NORM:

        def alone(affine: Any, memory: Any, x: Any) -> Any:
            return relu(x), memory

        return peers.Layer((), alone, alone)
    return peers.batch_norm(layer, channels, momentum=0.99, eps=EPS, activation=relu)


def count(devices: Sequence[Any], case: tuple[Any, ...], parts: int = 1) -> Row:
    """Compiles a norm and its activation; returns a device's traffic, in units of the bytes of
    its shard of x, which has the case's shape. `parts` devices share an example."""
    row: Row = dict(zip(CASE, case, strict=True))
    program, (rows, channels, *rest), direction, layer, dtype = case
    shape = (len(devices) // parts * rows, parts * channels, *rest)
    norm, channels, conv = norm_of(program, layer, shape), shape[1], eqx.nn.Identity()
    weight = jnp.ones(shape[1:] if program in OF_ROWS else channels)
    if program == BETWEEN:
        key = jax.random.key(0)
        conv = eqx.nn.Conv2d(channels, channels, 3, padding=1, dtype=dtype, key=key)

    def forward(parameters: Any, memory: Any, x: Any, *mask: Any) -> Any:
        before, affine, after = parameters
        apply = norm.evaluate if direction == INFERENCE else norm.train
        y, memory = apply(affine, memory, jax.vmap(before)(x), *mask)
        return jax.vmap(after)(y), memory

    x, f = jax.ShapeDtypeStruct(shape, dtype), forward
    given = [(conv, (weight, weight), conv), norm.memory, x]
    if direction not in (FORWARD, INFERENCE):
        frozen = direction in (FROZEN, OF_X)
        f = peers.forward_and_backward(forward, direction == APART, frozen)
        f = (lambda *given, both=f: both(*given)[2]) if direction == OF_X else f
        given.append(x)
    if layer == MASKED:
        given.append(jax.ShapeDtypeStruct(x.shape[:1] + x.shape[2:], bool))
    built, _ = build(devices, f, *given, split=x.ndim, parts=parts)
    text, size = built.as_text(), x.size * x.dtype.itemsize // len(devices)
    moved, needs = traffic.moved(text), built.memory_analysis().temp_size_in_bytes
    # A kernel's code is in the text, with the names of its operations.
    atomics = text.count(" scatter(") + text.count("atomic")
    counts = {"launches": len(moved), "atomics": atomics}
    if len(devices) > 1:
        counts["sent"] = traffic.sent(text) / size
    return {**row, "units": sum(moved.values()) / size, "temporary": needs / size, **counts}


def with_norm(layer: str, dtype: str, **how: Any) -> Any:
    """Returns a function of a number of channels that makes a batch norm."""
    if layer == OURS:
        return functools.partial(BatchNorm, approach="batch", **how)
    return functools.partial(eqx.nn.BatchNorm, mode="batch", dtype=jnp.dtype(dtype), **how)


def train(devices: Sequence[Any], dtype: str, layer: str, recomputes: bool) -> Row:
    """Compiles a step of ResNet-50 on 32 images; returns its residuals, temporary memory and
    traffic, in MB, and its compile time."""
    make = eqx.nn.make_with_state(networks.resnet_50)
    made, state = make(with_norm(layer, dtype, axis_name="batch"), jnp.dtype(dtype))
    weights, static = eqx.partition(made, eqx.is_inexact_array)

    def loss(weights: Any, state: Any, x: Any, labels: Any) -> Any:
        y, state = jax.vmap(eqx.combine(weights, static), **MAPPED)(x, state)
        picked = jnp.take_along_axis(jax.nn.log_softmax(y), labels[:, None], axis=1)
        return -picked.astype(jnp.float32).mean(), state

    f = jax.checkpoint(loss, policy=recompute_outputs) if recomputes else loss

    def step(weights: Any, *state_and_batch: Any) -> Any:
        value, gradients = jax.value_and_grad(f, has_aux=True)(weights, *state_and_batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), weights, gradients), value

    x = jax.ShapeDtypeStruct((32, 3, 224, 224), jnp.dtype(dtype))
    given = weights, state, x, jax.ShapeDtypeStruct((32,), jnp.int32)
    kept = jax.eval_shape(lambda w, *r: jax.vjp(lambda w: f(w, *r), w, has_aux=True)[1], *given)
    program, seconds = build(devices, step, *given)
    row = {"layer": layer, "dtype": dtype, "recomputes": recomputes}
    row["kept"] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)) / 1e6
    row["temporaries"] = program.memory_analysis().temp_size_in_bytes / 1e6
    row["moved"] = sum(traffic.moved(program.as_text()).values()) / 1e6
    return {**row, "seconds": seconds}  # of the processor, to lower and compile


# 0.2 are for partial sums and the sixteenth of x that XLA reads twice for the statistics. The
# kernel needs columns, so an image is copied to columns. 29.4 (25.1 without a norm) is a count.
MOST: dict[str, dict[str, Any]] = {
    GPU: {
        "by XLA: at most 7.2 times x's bytes": (ALONE, (), (BOTH,), (OURS,), 7.2),
        "by Pallas, on columns: at most 7.2": (ALONE, (DENSE,), (BOTH,), (OURS_PALLAS,), 7.2),
        "by Pallas, on images: at most 9.2": (ALONE, IMAGES, (BOTH,), (OURS_PALLAS,), 9.2),
        "by Pallas, forward: at most 3.2": (ALONE, COLUMNS, (FORWARD,), PALLAS, 3.2),
        "rows by Pallas, forward: at most 2.1": (SINGLE, (), (FORWARD,), PALLAS, 2.1),
        "rows by Pallas, both ways: at most 5.3": (OF_ROWS, (), (APART,), PALLAS, 5.3),
        "GroupNorm of vectors by Pallas: at most 5.6": ((GROUP,), (), (APART,), PALLAS, 5.6),
        "InstanceNorm by Pallas: at most 5.1": ((INSTANCE,), (), (APART,), PALLAS, 5.1),
        "between convolutions: at most 29.4": ((BETWEEN,), (), (BOTH,), LAYERS[:3], 29.4),
        "LayerNorm: at most 8.4": ((LAYER,), (), (BOTH, APART), (OURS,), 8.4),
        "RMSNorm: at most 7.2": ((RMS,), (), (BOTH, APART), (OURS,), 7.2),
        "GroupNorm: at most 8.3": ((GROUP,), (), (BOTH, APART), (OURS,), 8.3),
        "InstanceNorm: at most 8.2": ((INSTANCE,), (), (BOTH, APART), (OURS,), 8.2),
        "BatchNorm, forward: at most 3.2": ((RELU,), LONG, (FORWARD,), (OURS,), 3.2),
        "BatchNorm of few rows: at most 8.5": ((RELU,), COLUMNS[3:], (APART,), (OURS,), 8.5),
        "LayerNorm, axis=0: at most 7.7": ((CHANNEL,), (), (BOTH,), (OURS,), 7.7),
        "of one example, forward: at most 2.2": (SINGLE, (), (FORWARD,), (OURS,), 2.2),
        "of one example, gradient of x: at most 3.1": (SINGLE, (), (OF_X,), (OURS,), 3.1),
        "of one example, with y: at most 5.3": (SINGLE, (), (FROZEN,), (OURS,), 5.3),
    },
    TPU: {
        "BatchNorm + ReLU: at most 7.1 times x's bytes": ((RELU,), (), (BOTH,), (OURS,), 7.1),
        "LayerNorm: at most 7.1": ((LAYER,), (), (BOTH,), (OURS,), 7.1),
        "RMSNorm: at most 7.1": ((RMS,), (), (BOTH,), (OURS,), 7.1),
        "GroupNorm of images: at most 7.1": ((GROUP,), LARGE, (BOTH,), (OURS,), 7.1),
        "InstanceNorm: at most 7.1": ((INSTANCE,), (), (BOTH,), (OURS,), 7.1),
        "of images, forward: at most 3.1": ((), LARGE, (FORWARD,), (OURS,), 3.1),
        "LayerNorm, axis=0: at most 7.1": ((CHANNEL,), (), (BOTH,), (OURS,), 7.1),
        "rows by Pallas, forward: at most 2.1": (OF_ROWS, (), (FORWARD,), PALLAS, 2.1),
        "rows by Pallas, both ways: at most 5.1": (OF_ROWS, (), (BOTH, APART), PALLAS, 5.1),
    },
}


def moves_little(name: str, rows: list[Row]) -> list[Verdict]:
    """Judges each claim of `MOST` for which there are programs."""
    verdicts = []
    for claim, (*case, most) in MOST[name].items():
        where = [(key, values) for key, values in zip(CASE, case, strict=False) if values]
        chosen = [row for row in rows if all(row[key] in values for key, values in where)]
        if found := [row["units"] for row in chosen]:
            measured = f"{max(found):.2f}, of {len(found)} programs"
            verdicts.append((claim, measured, max(found) <= most))
    return verdicts


# Vectors of partial sums and weights, broadcast to the shape of x, are no more than SMALL.
SMALL = 0.07
# Why Equinox's layer has less traffic or needs less memory, by program and shape, or direction.
LIMITS = {
    (GROUP, SHAPES[TPU][0]): "groups of 16: a float32 of each group is moved for 16 values",
    (CHANNEL, CONVNEXT[0]): "of each 96 values a mean, its rest and rstd are kept in float32",
    (RMS, BOTH): "y is computed as without a gradient, and not together with the gradient of x",
    (GROUP, BOTH): "y is computed as without a gradient, with weights repeated along a row",
    (BETWEEN, IMAGES[0]): "y and dx are results of one kernel, which reads x once for both",
}


def is_no_worse(rows: list[Row]) -> tuple[list[Verdict], list[Goal]]:
    """Compares traffic and temporary memory with those of Equinox's layers; returns claims, and
    goals for the programs in `LIMITS`."""
    verdicts, goals = [], []
    for field, claim in (("units", "moves"), ("temporary", "needs temporary memory")):
        found = {tuple(row[key] for key in CASE): row[field] for row in rows}
        pairs: dict[Any, list[tuple[float, str]]] = {}
        for (program, shape, direction, layer, dtype), ours in found.items():
            theirs = found.get((program, shape, direction, EQUINOX, dtype))
            if layer in (OURS, OURS_SEPARATE) and theirs is not None:
                said = f"{direction}, {layer}, {dtype} ({ours:.2f}, {theirs:.2f})"
                places = ((program, of) for of in (shape, direction))
                place = next(filter(LIMITS.__contains__, places), None)
                said = said if place else f"{program}, {report.text(shape)}, {said}"
                pairs.setdefault(place, []).append((ours - theirs, said))
        for place, compared in pairs.items():
            compared.sort(reverse=True)
            more = [said for excess, said in compared if excess > SMALL]
            measured = f"{len(more)} of {len(compared)}: {'; '.join(more or [compared[0][1]])}"
            if place is None:
                said = f"nowhere more than Equinox {claim}, beyond {SMALL:.0%} of x"
                verdicts.append((said, measured, not more))
            elif more:
                said = f"{place[0]}, {report.text(place[1])}: {claim} no more than Equinox"
                goals.append((said, measured, LIMITS[place]))
    return verdicts, goals


def count_split(devices: Sequence[Any], target: str) -> list[Row]:
    """Returns a device's units in programs that `jit` splits over a mesh, beside those of one
    device and those of Equinox, and what a device gets from others."""
    cases = [
        (mesh, (program, shape, direction, layer, dtype))
        for meshes, *grid, layers in SPLIT[target]
        for mesh, program, shape in itertools.product(meshes, *grid)
        for direction in (FORWARD, APART, *((OF_X,) if program in SINGLE else ()))
        for layer, dtype in itertools.product(layers, DTYPES)
    ]
    programs = [
        ((mesh, case), ((1,), case), (mesh, (*case[:3], EQUINOX, case[4])))
        for mesh, case in cases
    ]
    every = [*dict.fromkeys(itertools.chain(*programs))]

    def counted(program: tuple[tuple[int, ...], tuple[Any, ...]]) -> Row:
        mesh, case = program
        return count(devices[: math.prod(mesh)], case, math.prod(mesh[1:]))

    found = dict(zip(every, in_threads(counted, every, "program"), strict=True))
    rows = []
    for (mesh, case), three in zip(cases, programs, strict=True):
        units = (found[program]["units"] for program in three)
        values = (*case, mesh, *units, found[mesh, case]["sent"])
        rows.append(dict(zip((*CASE, *OF_MESH), values, strict=True)))
    return rows


def is_split_well(rows: list[Row]) -> tuple[list[Verdict], Goal]:
    """Judges programs that `jit` splits; returns claims and a goal: as little traffic as on one
    device and as in Equinox's, and no x that is sent."""
    mesh, many, one, theirs, sent = OF_MESH

    def said(row: Row, number: float) -> str:
        return f"{', '.join(report.text(row[key]) for key in (*CASE, mesh))} ({number:.2f})"

    def judged(claim: str, most: float, rows: list[Row], of: Any) -> Verdict:
        worst = max(rows, key=of)
        return f"jit over devices: {claim}", said(worst, of(worst)), of(worst) <= most

    # A part of a row is no shorter row.
    of_examples = [row for row in rows if row[mesh] != MESH]
    claim = "at most 1.1 times the bytes of one device"
    verdicts = [
        judged(claim, 1.1, of_examples, lambda row: row[many] / row[one]),
        judged(f"at most {SMALL:.0%} of x sent", SMALL, rows, lambda row: row[sent]),
    ]
    more = [said(r, r[many] - r[theirs]) for r in rows if r[many] - r[theirs] > SMALL]
    goal = f"jit over devices: nowhere more than Equinox, beyond {SMALL:.0%} of x"
    found = f"{len(more)} of {len(rows)}: {'; '.join(more or ['none'])}"
    limit = (
        "of each 192 values a mean, its rest and rstd; in 4 MB of x, partial sums; of split "
        "rows, the parts' moments"
    )
    return verdicts, (goal, found, limit)


def adds_in_order(rows: list[Row]) -> Verdict:
    claim = "no program has a scatter, which by default adds atomically, or such a kernel"
    number = sum(row["atomics"] > 0 for row in rows)
    return claim, f"{number} of {len(rows)} programs", number == 0


def shares(rows: list[Row], field: str, recomputes: bool, of: str = OURS) -> list[float]:
    """Returns a step's need relative to one with the layer `of`, for each dtype."""
    need = {(row["layer"], row["recomputes"], row["dtype"]): row[field] for row in rows}
    return [need[OURS, recomputes, dtype] / need[of, False, dtype] for dtype in DTYPES]


def recomputing_saves(rows: list[Row]) -> Verdict:
    most = {"kept": 0.4, "temporaries": 0.8, "moved": 1.15}
    found = {field: max(shares(rows, field, True)) for field in most}
    claim = "recompute_outputs: at most 0.4 kept, 0.8 temporaries, 1.15 moved"
    measured = ", ".join(f"{field} {value:.2f}" for field, value in found.items())
    return claim, measured, all(found[field] <= most[field] for field in most)


def beside(device: str, rows: list[Row]) -> list[list[str]]:
    """Returns lines, with a header: units of eqx-norm / Equinox (and temporary memory)."""
    said = {}
    for row in rows:
        needs = f" ({row['temporary']:.2f})" if row["temporary"] > 0.01 else ""
        said[tuple(row[key] for key in CASE)] = f"{row['units']:.2f}{needs}"
    lines: dict[Any, dict[str, str]] = {}
    for (program, shape, direction, layer, dtype), theirs in said.items():
        if layer == EQUINOX:
            line = lines.setdefault((program, shape, dtype), dict.fromkeys(DIRECTIONS, ""))
            line[direction] = f"{said[program, shape, direction, OURS, dtype]} / {theirs}"
    header = ["device", "program", "shape", "dtype", *DIRECTIONS]
    of = [[device, *map(report.text, case), *line.values()] for case, line in lines.items()]
    return [header, *of]


def every_case(target: str) -> list[tuple[Any, ...]]:
    """Returns every combination of `CASE` to compile, once each."""
    grids = (itertools.product(*grid, DTYPES) for grid in GRIDS[target])
    return [*dict.fromkeys(itertools.chain(*grids))]


def main() -> int:
    experiment = Experiment("compiled", __doc__, "few programs, no ResNet")
    parser = experiment.parser
    there = [target for target in PLUGIN if importlib.util.find_spec(PLUGIN[target])]
    default = (*there, GPU)[0]
    parser.add_argument("--target", choices=DEVICE, default=default, help=f"default: {default}")
    quick, target = experiment.options.quick, experiment.options.target
    if target not in there:
        parser.error(f"{PLUGIN[target]} is missing: run make {target}-compile-check")
    if target == TPU:
        experiment.name = "compiled_tpu"
    jax.config.update("jax_platforms", "cpu")  # otherwise jax looks for the device and fails
    every = every_case(target)
    nets = [*itertools.product(DTYPES, ((OURS, False), (OURS, True), (EQUINOX, False)))]
    if quick:
        few = [c for c in every if c[2] == BOTH and c[3] in (OURS, OURS_PALLAS, EQUINOX)]
        every = [*{case[::3]: case for case in few[::-1]}.values()][::-1]
    if quick or target == TPU:
        nets = []
    devices = described(target)
    one = devices[:1]
    programs = in_threads(functools.partial(count, one), every, "program")
    many = [] if quick else count_split(devices, target)
    rounds = [
        [train(one, dtype, *net) for dtype, net in nets] for _ in progress(range(2), "round")
    ]
    # The shorter of two compile times counts.
    steps = [min(both, key=lambda row: row["seconds"]) for both in zip(*rounds, strict=True)]
    verdicts, goals = is_no_worse(programs)
    verdicts = [*moves_little(target, programs), *verdicts, adds_in_order(programs)]
    if many:
        split, goal = is_split_well(many)
        verdicts += split
        goals.append(goal)
    if steps:
        verdicts.append(recomputing_saves(steps))
        found = shares(steps, "temporaries", True), shares(steps, "seconds", False, EQUINOX)
        kept, time_ = (f"{bfloat16:.2f}, {float32:.2f}" for bfloat16, float32 in found)
        limits = "convolutions' outputs alone are 0.52", "more operations, larger fusions"
        goals.append(("recompute_outputs: 0.6 of XLA's temporary memory", kept, limits[0]))
        goals.append(("ResNet-50: at most 1.2 of Equinox's compile time", time_, limits[1]))
    about = {"device": f"{DEVICE[target]}, not there"}
    tables, lines = [], beside(DEVICE[target], programs)
    print("", report.table(lines[0], lines[1:]), sep="\n")
    for part, rows in {"programs": programs, "devices": many, "memory": steps}.items():
        if not rows:
            continue
        hidden = {*DIRECTIONS, "float32"} - {BOTH} if rows is programs else set()
        cells = [[*row.values()] for row in rows]
        experiment.save_csv(list(rows[0]), cells, part=part)
        shown = [line for line in cells if not hidden & {*line}]
        tables.append(report.table([UNITS.get(key, key) for key in rows[0]], shown))
    ours = [row["units"] for row in programs if {OURS, BOTH} <= {*row.values()}]
    return experiment.publish(
        asked=f"How many bytes do the layers move on a {target.upper()}?",
        answer=f"forward and backward: {min(ours):.1f} to {max(ours):.1f} times x's bytes",
        tables=tables,
        verdicts=[(f"{i}. {v[0]}", *v[1:]) for i, v in enumerate(verdicts, 1)],
        goals=goals,
        environment=machine.environment(PLUGIN[target]) | about,
        beside=lines,
    )


if __name__ == "__main__":
    sys.exit(main())
